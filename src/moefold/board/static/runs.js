// The table of runs: sorted by a column, the drawn runs first.
"use strict";

(() => {
  const { element } = Board;
  const SEARCH_FROM = 7;
  const natural = new Intl.Collator("en", { numeric: true });
  const state = { sort: Board.address.get("sort") || "last", filter: Board.address.get("name") || "" };

  const progress = (run, isChosen) => {
    if (run.has_more && isChosen) return `reading, ${Math.floor(100 * run.read)} %`;
    return run.steps ? `${Board.integer(run.step)} of ${Board.integer(run.steps)}` : Board.integer(run.step);
  };

  const number = (value) => (value === "nan" ? element("span", { class: "bad", title: "not finite" }, "nan") : Board.number(value));

  // Text and value of a cell; `first` is the direction of the first click: 1 for the smallest first.
  const COLUMNS = [
    { id: "run", title: "run", first: 1, value: (run) => run.name },
    { id: "state", title: "state", first: 1, value: (run) => run.state, cell: (run) => element("span", { class: `state ${run.state}` }, run.state) },
    { id: "step", title: "step", first: -1, class: "right", value: (run) => run.step, cell: progress },
    { id: "loss", title: "loss", first: 1, class: "right", value: (run) => run.reward ?? run.loss,
      cell: (run) => [number(run.reward ?? run.loss), run.reward === null ? "" : " reward"] },
    { id: "held-out", title: "held-out", first: 1, class: "right narrow-off", value: (run) => run.eval_loss, cell: (run) => number(run.eval_loss) },
    { id: "speed", title: "tokens/s", first: -1, class: "right narrow-off", value: (run) => run.tokens_per_s, cell: (run) => number(run.tokens_per_s) },
    { id: "mapping", title: "mapping", first: 1, class: "narrow-off", value: (run) => run.mapping || null, cell: (run) => run.mapping },
    { id: "faults", title: "faults", first: -1, class: "right narrow-off", value: (run) => run.num_faults,
      cell: (run) => (run.num_faults ? Board.integer(run.num_faults) : "") },
    // By the minute, and running runs are equally new: else rows would change places at each look.
    { id: "last", title: "last step", first: -1, class: "right narrow-off",
      value: (run) => (run.state === "running" ? Infinity : run.modified_s && Math.floor(run.modified_s / 60)),
      cell: (run) => Board.duration(run.age_s) },
  ];

  const compared = (a, b) => (typeof a === "string" ? natural.compare(a, b) : a === b ? 0 : a - b);

  // Runs by the column of the table; those without a value last, and later names first among equals.
  const sorted = (runs, column, direction) => [...runs].sort((one, other) => {
    const values = [one, other].map(column.value).map((value) => (value === "nan" ? null : value));
    const unknown = values.map((value) => value === null || value === undefined);
    if (unknown[0] !== unknown[1]) return unknown[0] ? 1 : -1;
    return (unknown[0] ? 0 : direction * compared(...values)) || natural.compare(other.name, one.name);
  });

  const sorting = () => {
    const id = state.sort.replace(/^-/, "");
    const column = COLUMNS.find((one) => one.id === id) || COLUMNS.at(-1);
    return { column, direction: (state.sort.startsWith("-") ? -1 : 1) * column.first };
  };

  Board.newestFirst = (runs) => sorted(runs, COLUMNS.at(-1), -1);

  Board.byName = (runs) => [...runs].sort((one, other) => natural.compare(one.name, other.name));

  const heading = (column, redraw) => {
    const { column: current, direction } = sorting();
    const isCurrent = column === current;
    const arrow = isCurrent ? (direction === 1 ? " ▲" : " ▼") : "";
    return element("th", { scope: "col", class: column.class || "", "aria-sort": isCurrent ? (direction === 1 ? "ascending" : "descending") : "none" },
      element("button", { type: "button", id: `sort-${column.id}`, class: "heading", title: `Sort by ${column.title}`, onclick: () => {
        state.sort = isCurrent && !state.sort.startsWith("-") ? `-${column.id}` : column.id;
        Board.address.set({ sort: state.sort === "last" ? null : state.sort });
        redraw();
      } }, column.title + arrow));
  };

  const problems = (run, isChosen) => {
    if (!run.problems.length) return null;
    const rest = run.problems.length - 1;
    const shown = isChosen || !rest ? run.problems : [`${run.problems[0]}, and ${rest} more`];
    return element("tr", { class: "problems", title: run.problems.join("\n") },
      element("td", { colspan: String(COLUMNS.length) }, shown.map((text) => element("p", {}, text))));
  };

  // The row of a run, and below it one of what is wrong with its files.
  const rows = (run, choice) => {
    const isChosen = choice.keys.includes(run.key);
    const box = element("input", { type: "checkbox", id: `run-${run.key}`, checked: isChosen,
      disabled: !isChosen && choice.keys.length >= choice.max, onchange: () => choice.set(run.key, box.checked) });
    const label = element("label", { class: "run-label", title: run.path, for: box.id }, box, Board.swatch(isChosen ? run.style : null), run.name);
    const cells = COLUMNS.slice(1).map((column) => element("td", { class: column.class || "" }, column.cell(run, isChosen)));
    const below = problems(run, isChosen);
    const names = [isChosen ? "chosen" : "", below ? "has-problems" : ""].join(" ").trim();
    return [element("tr", { class: names }, element("td", {}, label), cells), below];
  };

  const tools = (redraw) => {
    const input = element("input", { type: "search", value: state.filter, oninput: () => {
      state.filter = input.value;
      Board.address.set({ name: state.filter });
      redraw();
    } });
    return element("div", { class: "run-tools" },
      element("label", { class: "field" }, element("span", {}, "Name has"), input),
      element("button", { type: "button", class: "small draw-shown" }, "Draw these"),
      element("button", { type: "button", class: "small draw-none" }, "Draw none"),
      element("span", { class: "muted run-count", role: "status" }, ""));
  };

  const setTools = (place, shown, total, choice) => {
    const bar = place.querySelector(".run-tools");
    bar.hidden = total < SEARCH_FROM;
    const drawn = choice.keys.length;
    const isFull = drawn >= choice.max;
    bar.querySelector(".run-count").textContent = `${drawn} of ${total} drawn` +
      (isFull ? `, the most at once: uncheck one to draw another` : "") + (shown.length < total ? `; ${shown.length} have this name` : "");
    const all = bar.querySelector(".draw-shown");
    all.onclick = () => choice.setAll([...new Set([...shown.filter((run) => choice.keys.includes(run.key)), ...shown])].slice(0, choice.max).map((run) => run.key));
    all.textContent = shown.length > choice.max ? `Draw the first ${choice.max}` : "Draw all of these";
    const none = bar.querySelector(".draw-none");
    none.onclick = () => choice.setAll([]);
    none.disabled = !drawn;
  };

  // `choice` has the keys of the drawn runs, their largest number, and the functions that change them.
  Board.drawRuns = (place, runs, choice) => {
    const redraw = () => Board.drawRuns(place, runs, choice);
    if (!place.querySelector(".run-tools")) place.append(tools(() => place.redraw()), element("div", { class: "scroll" }));
    place.redraw = redraw;
    const { column, direction } = sorting();
    const named = runs.filter((run) => run.name.toLowerCase().includes(state.filter.toLowerCase()));
    const order = sorted(named, column, direction);
    const isChosen = (run) => choice.keys.includes(run.key);
    const shown = [...order.filter(isChosen), ...order.filter((run) => !isChosen(run))];
    setTools(place, shown, runs.length, choice);
    const scroll = place.querySelector(".scroll");
    const table = element("table", { class: "run-table" },
      element("thead", {}, element("tr", {}, COLUMNS.map((one) => heading(one, redraw)))),
      element("tbody", {}, shown.flatMap((run) => rows(run, choice))));
    // A new table would lose a click that has begun, a selected text, and the place of the focus.
    const drawn = `${choice.keys.length >= choice.max}${table.outerHTML}`;
    if (scroll.matches(":active") || (scroll.drawn === drawn && scroll.choice === choice.keys.join())) return;
    scroll.drawn = drawn;
    scroll.choice = choice.keys.join();
    const focused = scroll.contains(document.activeElement) ? document.activeElement.id : "";
    scroll.replaceChildren(table);
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };
})();
