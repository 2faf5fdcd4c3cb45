"use strict";
const table = document.getElementById("main");
const headers = [...table.tHead.rows[0].cells];

function compare(a, b) {
  const [x, y] = [Number(a), Number(b)];
  return Number.isNaN(x) || Number.isNaN(y) ? a.localeCompare(b) : x - y;
}

function sortBy(column) {
  const descending = headers[column].getAttribute("aria-sort") === "ascending";
  headers.forEach((header) => header.setAttribute("aria-sort", "none"));
  headers[column].setAttribute("aria-sort", descending ? "descending" : "ascending");
  const order = (row) => row.cells[column].dataset.order;
  const rows = [...table.tBodies[0].rows];
  const known = rows.filter((row) => order(row) !== undefined);
  known.sort((a, b) => (descending ? -1 : 1) * compare(order(a), order(b)));
  const unknown = rows.filter((row) => order(row) === undefined);
  table.tBodies[0].append(...known, ...unknown);
}

headers.forEach((header, column) => {
  header.querySelector("button").addEventListener("click", () => sortBy(column));
});
