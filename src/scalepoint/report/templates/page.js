"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  document.documentElement.classList.add("js");

  const table = byId("layer-table");
  if (table) {
    const body = table.tBodies[0];
    const heads = [...table.tHead.rows[0].cells];
    const rows = [...body.rows].map((row, index) => ({
      row, index, precision: row.dataset.precision, text: null,
    }));
    const textOf = (each) => {
      if (each.text === null) {
        const title = each.row.querySelector("bdi").title;
        each.text = (each.row.textContent + " " + title).toLowerCase();
      }
      return each.text;
    };
    const filter = byId("filter"), precision = byId("precision"), shown = byId("shown");
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const each of rows) {
        const fits = (!precision.value || each.precision === precision.value)
          && words.every((word) => textOf(each).includes(word));
        if (each.row.hidden === fits) each.row.hidden = !fits;
        count += fits;
      }
      shown.textContent = count === rows.length ? `${count} layers` : `${count} of ${rows.length} layers`;
    };
    let timer = 0;
    filter.addEventListener("input", () => { clearTimeout(timer); timer = setTimeout(apply, 60); });
    precision.addEventListener("change", apply);

    const collator = new Intl.Collator("en", { numeric: true });
    const sort = (column) => {
      const head = heads[column], now = head.getAttribute("aria-sort"), isNumber = head.dataset.kind === "number";
      const up = now ? now === "descending" : head.dataset.first === "up";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const keyed = rows.map((each) => {
        const cell = each.row.cells[column];
        const key = isNumber ? (cell.dataset.v === undefined ? null : Number(cell.dataset.v)) : cell.textContent || null;
        return { each, key };
      });
      const compare = isNumber ? (a, b) => (a < b ? -1 : a > b ? 1 : 0) : collator.compare;
      keyed.sort((a, b) => {
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.each.index - b.each.index;
        return (up ? 1 : -1) * compare(a.key, b.key) || a.each.index - b.each.index;
      });
      const all = document.createDocumentFragment();
      for (const { each } of keyed) all.append(each.row);
      body.append(all);
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));
    if (filter.value || precision.value) apply();
  }

  const chooser = byId("block");
  if (chooser) {
    const blocks = [...document.querySelectorAll("details.block")];
    for (const each of blocks) each.firstElementChild.tabIndex = -1;
    const show = (id) => {
      for (const each of blocks) { each.hidden = each.id !== id; each.open = each.id === id; }
      chooser.value = id;
    };
    chooser.addEventListener("change", () => show(chooser.value));
    const follow = () => {
      const id = location.hash.slice(1);
      if (!blocks.some((each) => each.id === id)) return false;
      show(id);
      return true;
    };
    addEventListener("hashchange", follow);
    if (!follow()) show(blocks[0].id);
  }

  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", () => {
      const text = button.parentElement.nextElementSibling;
      getSelection().selectAllChildren(text); // stays selected where the clipboard is refused
      const say = (word) => { button.textContent = word; setTimeout(() => { button.textContent = "Copy"; }, 2000); };
      const refused = () => say(document.execCommand("copy") ? "Copied" : "Selected");
      if (navigator.clipboard) navigator.clipboard.writeText(text.textContent).then(() => say("Copied"), refused);
      else refused();
    });
  }

  const save = byId("save-data");
  save.hidden = false;
  save.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([byId("report-data").textContent], { type: "application/json" }));
    link.download = "report.json";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  });
})();
