// Browsers start no worker in a page that was opened as a file. There, run a worker's script in a hidden frame, so that
// search works in a site that was copied to a disk.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const script = (address) => new Promise((resolve, reject) => {
        const element = frame.contentDocument.createElement("script");
        element.src = address;
        element.onload = resolve;
        element.onerror = reject;
        frame.contentDocument.head.append(element);
      });
      inside.postMessage = (data) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      };
      inside.importScripts = (...addresses) => Promise.all(addresses.map(script));
      this.frame = frame;
      this.ready = script(new URL(url, document.baseURI).href);
    }

    postMessage(data) {
      const inside = this.frame.contentWindow;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
