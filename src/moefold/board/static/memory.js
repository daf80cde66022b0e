// The view of memory: bytes of every rank by part of the model.
"use strict";

(() => {
  const { element } = Board;
  const MAX_RANKS = 64;
  // As parallel/memory_tracking.py: a part has the same colour in every run, and the second dozen has stripes.
  const PARTS = [
    "weights", "gathered weights", "gradients", "optimizer", "buffers", "batch", "embedding", "norms", "attention",
    "core attention", "residual stream", "dense MLP", "router", "dispatch buffers", "experts", "shared experts", "logits",
    "postponed gradients", "pipeline", "brought back", "workspace", "other",
  ];
  const partClass = (part) => {
    const index = PARTS.includes(part) ? PARTS.indexOf(part) : PARTS.length;
    return `part-${index % 12}${index >= 12 ? " striped" : ""}`;
  };
  const state = { when: "peak_bytes" };

  const rankTotals = (parts) => {
    const count = Math.max(0, ...Object.values(parts).map((sizes) => sizes.length));
    return Array.from({ length: count }, (_, rank) => Object.values(parts).reduce((sum, sizes) => sum + (sizes[rank] || 0), 0));
  };

  const bars = (run, memory) => {
    const parts = memory[state.when];
    const names = Object.keys(parts).filter((part) => parts[part].some((size) => size > 0));
    const totals = rankTotals(parts);
    const most = Math.max(1, ...totals);
    const order = totals.map((_, rank) => rank);
    if (order.length > MAX_RANKS) order.sort((a, b) => totals[b] - totals[a]);
    const rows = order.slice(0, MAX_RANKS).map((rank) => {
      const bar = element("div", { class: "memory-bar" });
      names.forEach((part) => {
        const size = parts[part][rank] || 0;
        const segment = element("span", { class: partClass(part), title: `rank ${rank}, ${part}: ${Board.bytes(size)}` });
        segment.style.width = `${(100 * size) / most}%`;
        bar.append(segment);
      });
      return element("tr", {}, element("th", { scope: "row" }, String(rank)), element("td", { class: "bar-column" }, bar),
        element("td", { class: "right" }, Board.bytes(totals[rank])));
    });
    const legend = names.map((part) => {
      const sum = parts[part].reduce((a, b) => a + b, 0);
      return element("li", {}, element("span", { class: `swatch ${partClass(part)}` }), `${part}: ${Board.bytes(sum / totals.length)}`);
    });
    const left = order.length - rows.length;
    return element("section", {},
      element("h2", {}, Board.runLabel(run), ` step ${Board.integer(memory.step)}`),
      element("p", { class: "note" }, `Fullest: rank ${totals.indexOf(most)} with ${Board.bytes(most)}. ` +
        `Mean of ${totals.length === 1 ? "the one rank" : `the ${Board.integer(totals.length)} ranks`}, by part:`),
      element("ul", { class: "legend" }, legend),
      element("div", { class: "scroll" }, element("table", { class: "memory" },
        element("thead", {}, element("tr", {}, [["rank", ""], ["", ""], ["sum of the rank", "right"]].map(([text, name]) => element("th", { scope: "col", class: name }, text)))),
        element("tbody", {}, rows))),
      left > 0 ? Board.note(`The ${MAX_RANKS} ranks with the most bytes; ${left} others are left out.`) : null);
  };

  Board.memory = {
    title: "Memory",
    async update(panel, shared) {
      const answers = await Promise.all(shared.runs.map((run) => shared.get(run, "memory")));
      if (!shared.isCurrent()) return;
      const toolbar = element("div", { class: "toolbar" }, Board.select(
        "Bytes", [["peak_bytes", "at the peak of a step"], ["current_bytes", "before the update"]], state.when, (when) => {
          state.when = when;
          shared.refresh();
        }));
      const parts = shared.runs.map((run, i) => {
        const { memory } = answers[i];
        if (memory && rankTotals(memory[state.when]).length) return bars(run, memory);
        return element("section", {}, element("h2", {}, Board.runLabel(run)),
          Board.note("The memory was not measured: set metrics.memory_every = N. Curves has the peak of each step."));
      });
      panel.replaceChildren(toolbar, ...(parts.length ? parts : [Board.note("Choose a run above.")]));
    },
  };
})();
