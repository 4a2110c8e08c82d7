// Sort tables, copy commands, and open the details that a link leads to. The page can be read without this script.
"use strict";

function value(row, column) {
  const cell = row.children[column];
  return cell.dataset.v ?? cell.textContent;
}

function sort(table, head, column) {
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of table.querySelectorAll("[aria-sort]")) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const body = table.tBodies[0];
  const hasNumber = (row) => "v" in row.children[column].dataset;
  const rows = [...body.rows].sort((a, b) => {
    if (hasNumber(a) !== hasNumber(b)) return hasNumber(a) ? -1 : 1; // rows without a number stay at the end
    const order = value(a, column).localeCompare(value(b, column), "en", { numeric: true });
    const number = Number(value(a, column)) - Number(value(b, column));
    return (up ? 1 : -1) * (Number.isNaN(number) ? order : number);
  });
  body.append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  for (const head of table.querySelectorAll("th[data-col]")) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, head, Number(head.dataset.col)));
    head.append(button);
  }
}

for (const command of document.querySelectorAll("pre.command")) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "copy";
  button.textContent = "Copy the command";
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(command.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(command);
      button.textContent = "Selected: copy it with the keyboard";
    }
  });
  command.after(button);
}

function unfold() {
  const target = document.getElementById(location.hash.slice(1));
  const folded = [];
  const inside = target?.matches("section") ? target.querySelector(":scope > details") : target;
  for (let e = inside?.closest("details:not([open])"); e; e = e.parentElement.closest("details:not([open])")) folded.push(e);
  if (folded.length) {
    for (const e of folded) e.open = true;
    target.scrollIntoView();
  }
}
addEventListener("hashchange", unfold);
unfold();
