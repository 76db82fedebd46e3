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
    const textOf = (entry) => {
      if (entry.text === null) {
        const title = entry.row.querySelector("bdi").title;
        entry.text = (entry.row.textContent + " " + title).toLowerCase();
      }
      return entry.text;
    };
    const filter = byId("filter"), precision = byId("precision"), countText = byId("shown");
    const apply = () => {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      let count = 0;
      for (const entry of rows) {
        const fits = (!precision.value || entry.precision === precision.value)
          && words.every((word) => textOf(entry).includes(word));
        if (entry.row.hidden === fits) entry.row.hidden = !fits;
        count += fits;
      }
      countText.textContent = count === rows.length ? `${count} layers` : `${count} of ${rows.length} layers`;
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
      const keyed = rows.map((entry) => {
        const cell = entry.row.cells[column];
        const key = isNumber ? (cell.dataset.v === undefined ? null : Number(cell.dataset.v)) : cell.textContent || null;
        return { entry, key };
      });
      const compare = isNumber ? (a, b) => (a < b ? -1 : a > b ? 1 : 0) : collator.compare;
      keyed.sort((a, b) => {
        if (a.key === null || b.key === null) return (a.key === null) - (b.key === null) || a.entry.index - b.entry.index;
        return (up ? 1 : -1) * compare(a.key, b.key) || a.entry.index - b.entry.index;
      });
      const all = document.createDocumentFragment();
      for (const { entry } of keyed) all.append(entry.row);
      body.append(all);
    };
    heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => sort(column)));
    if (filter.value || precision.value) apply();
  }

  const chooser = byId("block");
  if (chooser) {
    const blocks = [...document.querySelectorAll("details.block")];
    for (const block of blocks) block.firstElementChild.tabIndex = -1;
    const show = (id) => {
      for (const block of blocks) { block.hidden = block.id !== id; block.open = block.id === id; }
      chooser.value = id;
    };
    chooser.addEventListener("change", () => show(chooser.value));
    const follow = () => {
      const id = location.hash.slice(1);
      if (!blocks.some((block) => block.id === id)) return false;
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
      getSelection().selectAllChildren(text); // so that the text can be copied by hand if the clipboard is not available
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
