"use strict";
// Sorting: a click on a column's button; numbers by data-v, text by itself; a second click turns it round.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th");
    const table = head.closest("table");
    const column = head.cellIndex;
    const numeric = head.classList.contains("n");
    const before = head.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = table.tBodies[0];
    const key = (row) => {
      const cell = row.cells[column];
      return numeric ? Number(cell.dataset.v) : cell.textContent;
    };
    const compare = numeric ? (a, b) => key(a) - key(b) : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
    const rows = [...body.rows].sort((a, b) => (down ? -compare(a, b) : compare(a, b)));
    body.append(...rows);
  });
}
document.documentElement.dataset.ready = "yes";
