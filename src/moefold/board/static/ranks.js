// The view of ranks: times of the ranks in a step, which rank was late, and the stragglers that the run reported.
"use strict";

(() => {
  const { element, number } = Board;

  const TIMES = [
    ["own_max_s", "slowest rank, own work"], ["own_median_s", "median rank, own work"],
    ["own_min_s", "fastest rank, own work"], ["wait_median_s", "median rank, waiting"],
    ["wait_min_s", "least waiting"], ["data_max_s", "longest data loading"],
  ];

  const timesTable = (times) => {
    const longest = Math.max(1e-9, ...TIMES.map(([name]) => times[name] || 0));
    return element("table", {}, element("tbody", {}, TIMES.filter(([name]) => name in times).map(([name, text]) => {
      const bar = element("span", { class: "time-bar" });
      bar.style.width = `${(100 * times[name]) / longest}%`;
      return element("tr", {}, element("th", { scope: "row" }, text), element("td", { class: "right" }, `${number(times[name])} s`),
        element("td", { class: "bar-column" }, bar));
    })));
  };

  const slowestTable = (slowest, steps) => element("table", {},
    element("thead", {}, element("tr", {}, ["rank", "slowest in", ""].map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, slowest.map(({ rank, steps: count }) => {
      const bar = element("span", { class: "time-bar" });
      bar.style.width = `${(100 * count) / steps}%`;
      return element("tr", {}, element("th", { scope: "row" }, String(rank)), element("td", { class: "right" }, `${count} of ${steps} steps`),
        element("td", { class: "bar-column" }, bar));
    })));

  // Which ranks were the slowest, over the steps: a rank that is slow for good is a band, chance is noise.
  const slowestMap = ({ ranks, steps, shares, left_out: leftOut }) => [
    Board.colorBar(Board.partColor, 0, 1, ["never", "in every step"]),
    Board.heatmap({
      title: "Slowest rank, over steps",
      rows: ranks.length,
      columns: steps.length,
      color: (row, column) => Board.partColor(shares[column][row]),
      describe: (row, column) =>
        `rank ${ranks[row]}: the slowest in ${Math.round(100 * shares[column][row])} % of ${Board.stepText(steps[column])}`,
      rowText: (row) => `rank ${ranks[row]}`,
      columnText: (column) => `step ${Board.integer(steps[column][0])}`,
    }),
    leftOut ? Board.note(`The ${ranks.length} ranks that were the slowest most often; ${leftOut} others are left out.`) : null,
  ];

  const stragglerTable = (stragglers) => element("table", {},
    element("thead", {}, element("tr", {}, ["step", "rank", "host", "own work", "median of its stage", "for data"].map((text) => element("th", { scope: "col" }, text)))),
    element("tbody", {}, stragglers.map((one) => element("tr", {},
      [one.step, one.rank, one.host, `${number(one.own_s)} s`, `${number(one.median_s)} s`, `${number(one.data_s)} s`].map(
        (value) => element("td", {}, String(value ?? "–")))))));

  const section = (run, { times, steps, slowest, slowest_over_steps: overSteps, stragglers }) => {
    const parts = [element("h2", {}, Board.runLabel(run))];
    if (!times) parts.push(Board.note("No times of ranks: the run has one rank, or faults.straggler_factor = 0."));
    else {
      parts.push(element("div", { class: "columns" },
        element("div", {}, element("h3", {}, `Times in step ${Board.integer(times.step)}`), timesTable(times)),
        element("div", {}, element("h3", {}, `Slowest rank of the last ${steps} steps`), slowestTable(slowest, steps))));
      if (overSteps) parts.push(...slowestMap(overSteps));
      parts.push(element("h3", {}, "Reported stragglers"));
      parts.push(stragglers.length ? element("div", { class: "scroll" }, stragglerTable(stragglers)) : Board.note("None."));
    }
    return element("section", {}, parts.filter(Boolean));
  };

  Board.ranks = {
    title: "Ranks",
    async update(panel, shared) {
      const answers = await Promise.all(shared.runs.map((run) => shared.get(run, "ranks")));
      if (!shared.isCurrent()) return;
      const parts = shared.runs.map((run, i) => section(run, answers[i]));
      panel.replaceChildren(...(parts.length ? parts : [Board.note("Choose a run above.")]));
    },
  };
})();
