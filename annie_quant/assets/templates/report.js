"use strict";
(() => {
  const $ = (selector, root = document) => root.querySelector(selector);
  const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

  // Theme: the system's until the reader switches.
  const button = $("#theme"), root = document.documentElement;
  const dark = () => (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const name = () => { button.textContent = dark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.setAttribute("aria-label", "Switch between light and dark");
  button.addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; name(); });
  name();

  // Figures with groups of panels: one group at a time.
  for (const figure of $$("figure")) {
    const tabs = $(".tabs", figure);
    if (!tabs) continue;
    const show = (group) => {
      for (const tab of $$("button", tabs)) tab.setAttribute("aria-pressed", String(tab.dataset.group === group));
      for (const panel of $$(".panel", figure)) panel.hidden = panel.dataset.group !== group;
    };
    tabs.hidden = false;
    tabs.addEventListener("click", (event) => { if (event.target.dataset.group) show(event.target.dataset.group); });
    show($("button", tabs).dataset.group);
  }

  // Tables that sort by a click on a heading.
  for (const table of $$("table.sortable")) {
    const body = table.tBodies[0];
    $$("thead tr:last-child th", table).forEach((head, column) => {
      const control = document.createElement("button");
      control.type = "button";
      control.append(...head.childNodes);
      head.append(control);
      control.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "ascending";
        for (const other of $$("th", table.tHead)) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "descending" : "ascending");
        const value = (row) => { const cell = row.cells[column], s = cell.dataset.s; return s === undefined ? cell.textContent : Number(s); };
        const rows = [...body.rows].sort((a, b) => {
          const x = value(a), y = value(b);
          const order = typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
          return up ? -order : order;
        });
        body.append(...rows);
      });
    });
  }

  // Mark a table that is wider than the page.
  for (const box of $$(".scroll")) {
    const cue = () => box.classList.toggle("over", box.scrollWidth > box.clientWidth + 1);
    cue();
    if (window.ResizeObserver) new ResizeObserver(cue).observe(box);
  }

  // Filters.
  const filters = (target) => $(`.filters[data-for="${target}"]`);
  const bar = filters("answers");
  if (bar) {
    const prompts = $$(".prompt").map((element) => ({ element, text: element.textContent.toLowerCase() }));
    const more = $("#answers .more"), STEP = 25;
    let limit = STEP;
    const apply = () => {
      const words = $("input[type=search]", bar).value.toLowerCase().trim();
      const workload = $("[name=workload]", bar).value, fault = $("[name=fault]", bar).value, model = $("[name=model]", bar).value;
      const differs = $("[name=differs]", bar).checked;
      let found = 0;
      for (const { element, text } of prompts) {
        const d = element.dataset;
        const hit = (!words || text.includes(words)) && (!workload || d.workload === workload) &&
          (!fault || (fault === "*" ? d.gates.trim() !== "" : d.gates.includes(` ${fault} `))) &&
          (!model || d.failed.includes(` ${model} `)) && (!differs || d.differs === "1");
        found += hit ? 1 : 0;
        element.hidden = !hit || found > limit;
      }
      more.hidden = found <= limit;
      more.textContent = `Show ${Math.min(STEP, found - limit)} more`;
      $("output", bar).textContent = `${found} of ${prompts.length} prompts match; ${Math.min(found, limit)} shown`;
    };
    bar.hidden = false;
    bar.addEventListener("input", () => { limit = STEP; apply(); });
    more.addEventListener("click", () => { limit += STEP; apply(); });
    apply();
  }
  const pairs = filters("comparisons");
  if (pairs) {
    const rows = $$("#each-workload tbody tr");
    const apply = () => {
      const words = $("input[type=search]", pairs).value.toLowerCase().split(/\s+/).filter(Boolean), only = $("input[type=checkbox]", pairs).checked;
      let shown = 0;
      for (const row of rows) {
        const text = row.textContent.toLowerCase();
        const hit = words.every((word) => text.includes(word)) && (!only || $(".sure", row));
        row.hidden = !hit;
        shown += hit ? 1 : 0;
      }
      $("output", pairs).textContent = `${shown} of ${rows.length}`;
    };
    pairs.hidden = false;
    pairs.addEventListener("input", apply);
    apply();
  }
})();
