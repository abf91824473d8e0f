// Tables that the reader can sort: a click on a head sorts by its column, a second click turns the order.

/** Numbers before texts, and both in order; an empty key is the last in either direction. */
function compareKeys(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === "");
  const [x, y] = [Number(a), Number(b)];
  if (!Number.isNaN(x) && !Number.isNaN(y)) return direction * (x - y);
  return direction * a.localeCompare(b);
}

function sortBy(table, head, column) {
  const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  const key = (row) => row.cells[column].dataset.key;
  const rows = [...table.tBodies[0].rows].sort((a, b) => compareKeys(key(a), key(b), direction));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    if (head.textContent === "") return;
    const button = make("button", { type: "button", title: "Sort by this column" }, head.textContent);
    button.addEventListener("click", () => sortBy(table, head, column));
    head.replaceChildren(button);
  });
}

document.documentElement.dataset.ready = "true";
