"use strict";
// The table of tokens on the page of a server; page.js asks for the numbers.

const USES = { // column of the table of tokens -> number, its quota, what the quota is for
  "Open streams": ["open", "most_streams", ""],
  Requests: ["requests", "requests_per_second", "/s"],
  Refused: ["refused"],
  Images: ["images", "predicted_images_per_second", "/s"],
  "Learned from": ["learned", "images_per_second", "/s"],
  Waiting: ["waiting"],
  Bytes: ["bytes", "bytes_in_flight", ""],
  "Learning share": ["learning_share"],
};

// What each token uses, with its quotas. An admin of all streams gets every token, others get their own.
function showTokens(tokens) {
  at("users").hidden = tokens.length === 0;
  if (at("user-heads").children.length === 0) {
    at("user-heads").append(...["User", ...Object.keys(USES)].map((words) => make("th", { role: "columnheader", scope: "col" }, words)));
  }
  at("user-rows").replaceChildren(...tokens.map((one) => make("tr", { role: "row" },
    make("th", { role: "rowheader", scope: "row", class: "name" }, `${one.name} (${one.role}${one.streams ? `, ${one.streams}…` : ""})`),
    ...Object.entries(USES).map(([label, [name, quota, unit]]) => make("td", { role: "cell", class: "number", "data-label": label },
      `${one[name].toLocaleString("en")}${typeof one[quota] === "number" ? ` of ${one[quota].toLocaleString("en")}${unit}` : ""}`)))));
}
