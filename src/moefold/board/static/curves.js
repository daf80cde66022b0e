// The view of curves: one chart a metric, all chosen runs in it.
"use strict";

(() => {
  const { element, number } = Board;

  // Group of the charts that are drawn large.
  const MAIN = "Training";
  const AXES = [["step", "step"], ["tokens", "tokens"], ["time_s", "training time"]];
  const NO_SMOOTHING = "0";
  const FEW_POINTS = 30;
  const HEIGHT = 210;
  const LEGEND_PX = 30;

  const { address } = Board;
  const readRange = () => {
    const bounds = ["from", "to"].map((name) => Number(address.get(name) ?? NaN));
    return bounds[0] < bounds[1] ? bounds : null;
  };
  const settings = {
    axis: AXES.some(([axis]) => axis === address.get("over")) ? address.get("over") : AXES[0][0],
    smoothing: address.get("smooth") || NO_SMOOTHING, range: readRange(),
    log: new Set(address.list("log")), wide: new Set(address.list("wide")),
  };
  const save = () => {
    const [from, to] = settings.range || [null, null];
    address.set({
      over: settings.axis === AXES[0][0] ? null : settings.axis, smooth: settings.smoothing === NO_SMOOTHING ? null : settings.smoothing,
      from, to, log: [...settings.log].join(","), wide: [...settings.wide].join(","),
    });
    context.refresh();
  };
  let charts = new Map();
  let root = null;
  let context = null;

  const isWorthShowing = (metric, answers) => answers.some(({ series }) => series[metric] && (metric === "loss" || !series[metric].is_zero));

  const grouped = (answers) => {
    const charts = new Map(answers.flatMap((answer) => answer.charts.map(([place, name, group, title]) => [name, { place, group, title }])));
    const groups = new Map();
    for (const [name, { group, title }] of [...charts].sort(([a, first], [b, second]) => first.place - second.place || (a < b ? -1 : 1))) {
      if (isWorthShowing(name, answers)) groups.set(group, [...(groups.get(group) || []), [name, title]]);
    }
    return [...groups];
  };

  const onAxis = (steps, axes) => {
    if (settings.axis === "step") return steps;
    const axis = axes[settings.axis];
    return axis ? steps.map((step) => Board.interpolate(axis.steps, axis.values, step)) : null;
  };

  // [x, values] or [x, values, smoothed] of a run; null without this metric.
  const table = (metric, { series, axes }) => {
    const found = series[metric];
    const xs = found ? onAxis(found.steps, axes) : null;
    if (!xs || !xs.length) return null;
    const smoothed = found.smoothed[settings.smoothing];
    const kept = xs.map((x, i) => i === 0 || x > xs[i - 1]);
    return [xs, found.values, ...(smoothed ? [smoothed] : [])].map((column) => column.filter((_, i) => kept[i]));
  };

  const aligned = (metric, runs, answers) => {
    const tables = answers.map((answer) => table(metric, answer));
    const shown = runs.map((run, i) => [run, tables[i]]).filter(([, columns]) => columns);
    return { runs: shown.map(([run]) => run), tables: shown.map(([, columns]) => columns) };
  };

  const isInside = (x) => !settings.range || (x >= settings.range[0] && x <= settings.range[1]);

  const axisText = (value) => {
    if (value === null || value === undefined) return "–";
    if (settings.axis === "time_s") return Board.duration(value);
    return settings.axis === "step" ? Board.integer(value) : number(value);
  };

  const valueText = (value) => (value === null ? "not finite" : number(value));

  // Index of the point of a series next to the mouse; without the mouse, of its last point in the picture.
  const legendIndex = (u, series) => {
    const [xs, values] = [u.data[0], u.data[series]];
    if (u.cursor.left >= 0) return u.cursor.idxs[series];
    for (let i = xs.length - 1; i >= 0; i -= 1) if (values[i] !== undefined && isInside(xs[i])) return i;
    return null;
  };

  // Charts of several runs have points at different steps: each run gives its nearest one.
  const nearest = (u, series, index) => {
    const values = u.data[series];
    if (index === null || series === 0) return index;
    const at = (i) => Math.abs(u.valToPos(u.data[0][i], "x") - u.cursor.left);
    let best = null;
    for (const direction of [-1, 1]) {
      for (let i = index; i >= 0 && i < values.length && at(i) <= LEGEND_PX; i += direction) {
        if (values[i] === undefined) continue;
        if (best === null || at(i) < at(best)) best = i;
        break;
      }
    }
    return best;
  };

  const seriesOf = (run, columns) => {
    const color = Board.color(run.style);
    const known = columns[1].filter((value) => value !== null).length;
    const isSmoothed = columns.length === 3;
    const value = (u, current, series) => {
      const index = legendIndex(u, series);
      if (index === null || index === undefined) return "–";
      const text = valueText(u.data[series][index]);
      return isSmoothed ? `${valueText(u.data[series - 1][index])} / ${text}` : text;
    };
    const line = { label: run.name, stroke: color, width: 1.6, dash: Board.dash(run.style), value };
    line.points = { show: known <= FEW_POINTS, size: 5, fill: color };
    if (!isSmoothed) return [line];
    return [{ ...line, stroke: `${color}50`, width: 1, dash: [], class: "raw", points: { show: false } }, line];
  };

  // Marks at the foot of a chart where a run has faults.
  const faultMarks = (chart) => (u) => {
    const context = u.ctx;
    context.save();
    for (const { run, faults, axes } of chart.faults) {
      context.fillStyle = Board.color(run.style);
      for (const x of onAxis(faults.map((fault) => fault.step).filter(Number.isFinite), axes) || []) {
        const left = u.valToPos(x, "x", true);
        if (left < u.bbox.left || left > u.bbox.left + u.bbox.width) continue;
        const bottom = u.bbox.top + u.bbox.height;
        const size = 5 * devicePixelRatio;
        context.beginPath();
        context.moveTo(left, bottom - 1.6 * size);
        context.lineTo(left - size, bottom);
        context.lineTo(left + size, bottom);
        context.fill();
      }
    }
    context.restore();
  };

  // Digits that tell neighbours on an axis apart.
  const tickDigits = (values, distance) => {
    const largest = Math.max(...values.map((value) => Math.abs(value ?? 0)));
    return Math.min(12, Math.max(4, Math.ceil(Math.log10(largest / distance) + 1e-9) + 1 || 4));
  };

  const options = (metric, title, width, chart, series) => ({
    width,
    height: HEIGHT,
    padding: [10, 24, 0, 0],
    series: [{ label: settings.axis === "time_s" ? "time" : settings.axis,
      value: (u) => axisText(u.data[0][u.cursor.left >= 0 ? u.cursor.idx : u.data[0].findLastIndex(isInside)]) +
        (series.some((one) => one.class === "raw") ? ", value / smoothed" : "") }, ...series],
    scales: {
      x: { time: false, range: (u, low, high) => settings.range || (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { distr: settings.log.has(metric) ? 3 : 1 },
    },
    axes: [
      { stroke: Board.variable("--muted"), grid: { stroke: Board.variable("--grid"), width: 1 }, ticks: { show: false },
        values: (u, values) => values.map((value) => (settings.axis === "step" && !Number.isInteger(value) ? null : axisText(value))),
        space: 60, size: 28, font: "11px system-ui, sans-serif" },
      { stroke: Board.variable("--muted"), grid: { stroke: Board.variable("--grid"), width: 1 }, ticks: { show: false },
        values: (u, values, axis, space, distance) => values.map((value) => (value === null ? null : number(value, tickDigits(values, distance)))), size: 54,
        font: "11px system-ui, sans-serif" },
    ],
    // Charts share the place of the mouse, and not the selection: each would zoom by itself.
    cursor: { dataIdx: nearest, sync: { key: "board", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
      drag: { x: true, y: false, setScale: false }, focus: { prox: 24 } },
    hooks: {
      draw: [faultMarks(chart)],
      setSelect: [(u) => {
        if (u.select.width < 4) return;
        const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
        u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        zoom(range);
      }],
    },
  });

  // Whole steps, tokens and seconds: what the address and the fields can show.
  const zoom = (range) => {
    settings.range = range && [Math.floor(range[0]), Math.max(Math.floor(range[0]) + 1, Math.ceil(range[1]))];
    save();
  };

  const wholeRun = () => element("button", { type: "button", class: "small", onclick: () => zoom(null) }, "Whole run");

  // Arrow keys move the cursor over the points of a chart; the legend has the values.
  const moveCursor = (event, u) => {
    const count = u.data[0].length;
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -count, End: count };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const from = u.cursor.idx ?? (steps[event.key] > 0 ? -1 : count);
    const index = Math.max(0, Math.min(count - 1, from + steps[event.key]));
    u.setCursor({ left: u.valToPos(u.data[0][index], "x"), top: u.over.clientHeight / 2 });
  };

  // Words instead of an empty picture, and the way back.
  const drawNote = (chart, words) => {
    if (chart.plot) chart.plot.destroy();
    chart.plot = null;
    chart.place.replaceChildren(element("p", { class: "nothing" }, words, settings.range ? [": ", wholeRun()] : ""));
  };

  // Say in the head which values the curves do not show, or do not smooth.
  const tag = (chart, found, tables) => {
    const broken = found.reduce((sum, one) => sum + one.num_nonfinite, 0);
    // An export has the numbers of whole runs only.
    const isKnown = broken > 0 && (Board.source.isLive || !settings.range);
    const isRaw = settings.smoothing !== NO_SMOOTHING && tables.length > 0 && tables.every((columns) => columns.length === 2);
    chart.tag.textContent = isKnown ? `${Board.integer(broken)} not finite` : isRaw ? "not smoothed" : "";
    chart.tag.classList.toggle("bad", isKnown);
  };

  const draw = (chart, runs, answers, faults) => {
    const { metric, title, place } = chart;
    const shown = aligned(metric, runs, answers);
    chart.faults = faults;
    const width = place.clientWidth;
    if (!width) return;
    const found = answers.map(({ series }) => series[metric]).filter(Boolean);
    tag(chart, found, shown.tables);
    const inside = shown.tables.flatMap(([xs, values]) => values.filter((_, i) => isInside(xs[i])));
    if (!inside.length) {
      drawNote(chart, "No points in this range");
      return;
    }
    if (inside.every((value) => value === null)) {
      const count = found.reduce((sum, one) => sum + one.num_points, 0);
      drawNote(chart, settings.range ? "No finite value in this range" : `${Board.integer(count)} values, none of them finite`);
      return;
    }
    const data = uPlot.join(shown.tables);
    const shape = JSON.stringify([
      shown.runs.map((run) => [run.key, run.style, run.name]), shown.tables.map((one) => [one.length, one[0].length <= FEW_POINTS]),
      settings.axis, settings.log.has(metric), Board.isDark(), width,
    ]);
    if (chart.plot && chart.shape === shape) {
      chart.plot.setData(data);
      return;
    }
    if (chart.plot) chart.plot.destroy();
    place.replaceChildren();
    chart.shape = shape;
    const series = shown.runs.flatMap((run, i) => seriesOf(run, shown.tables[i]));
    chart.plot = new uPlot(options(metric, title, width, chart, series), data, place);
    chart.plot.over.addEventListener("dblclick", () => zoom(null));
  };

  const card = (metric, title) => {
    const place = element("div", {
      class: "plot", tabindex: "0", role: "img", "aria-label": `${title}; arrow keys move over the points`,
      onkeydown: (event) => chart.plot && moveCursor(event, chart.plot),
    });
    const toggle = (set, text, label) => {
      const button = element("button", { type: "button", class: "small", "aria-label": `${label}: ${title}`,
        "aria-pressed": String(set.has(metric)), onclick: () => {
          if (!set.delete(metric)) set.add(metric);
          button.setAttribute("aria-pressed", String(set.has(metric)));
          box.classList.toggle("wide", settings.wide.has(metric));
          save();
        } }, text);
      return button;
    };
    const words = element("span", { class: "tag" });
    const box = element("article", { class: `card ${settings.wide.has(metric) ? "wide" : ""}` },
      element("div", { class: "card-head" }, element("h3", { title: metric }, title), words,
        toggle(settings.log, "log", "Logarithmic scale"), toggle(settings.wide, "wide", "Full width")),
      place);
    const chart = { metric, title, place, box, tag: words, plot: null, shape: "", faults: [] };
    return chart;
  };

  const toolbar = () => {
    const bound = (index, label) => {
      const value = settings.range ? String(Math.round(settings.range[index])) : "";
      const input = element("input", { type: "number", min: "0", value, placeholder: index ? "end" : "start",
        onchange: () => {
          const inputs = [...root.querySelectorAll(".toolbar input")];
          if (inputs.every((one) => one.value === "")) {
            zoom(null);
            return;
          }
          const [low, high] = inputs.map((one, i) => (one.value === "" ? [0, lastX][i] : Number(one.value)));
          input.setCustomValidity(low < high ? "" : "From must be below To");
          if (input.reportValidity()) zoom([low, high]);
        } });
      return element("label", { class: "field" }, element("span", {}, label), input);
    };
    const weights = Board.smoothingWeights.map((weight) => [weight, `${weight}, over ${Math.round(1 / (1 - weight))} steps`]);
    const smoothing = Board.select("Smoothing", [[NO_SMOOTHING, "none"], ...weights], settings.smoothing, (weight) => {
      settings.smoothing = weight;
      save();
    });
    smoothing.title = "Exponential mean by step, over every recorded step; not of learning rate, held-out values and counts";
    return element("div", { class: "toolbar" },
      Board.select("Over", AXES, settings.axis, (axis) => {
        settings.axis = axis;
        settings.range = null;
        save();
      }),
      smoothing,
      bound(0, "From"), bound(1, "To"),
      element("button", { type: "button", class: "small reset", onclick: () => zoom(null) }, "Whole run"));
  };

  // Steps of the visible range, for finer points from the server; the axes of the last answer map tokens and time.
  const query = (key) => {
    const smooth = settings.smoothing === NO_SMOOTHING ? {} : { smooth: settings.smoothing };
    if (!settings.range || !Board.source.isLive) return smooth;
    let [low, high] = settings.range;
    if (settings.axis !== "step") {
      const axis = lastAxes.get(key)?.[settings.axis];
      if (!axis) return smooth;
      [low, high] = [low, high].map((x) => Board.interpolate(axis.values, axis.steps, x));
    }
    return { first: Math.max(0, Math.floor(low)), last: Math.max(0, Math.ceil(high)), ...smooth };
  };

  const fetchSeries = async (shared, run) => {
    const { get } = shared;
    if (settings.range && settings.axis !== "step" && Board.source.isLive && !lastAxes.has(run.key)) {
      lastAxes.set(run.key, (await get(run, "series")).axes);
    }
    return get(run, "series", query(run.key));
  };
  const lastAxes = new Map();
  let lastX = 0;

  // Runs that have no point in the range; all of them, in place of empty charts.
  const drawMissing = (runs, answers) => {
    const hasPoint = answers.map((answer) => Object.keys(answer.series).some((metric) => table(metric, answer)?.[0].some(isInside)));
    const missing = runs.filter((_, i) => settings.range && !hasPoint[i]);
    const isNothing = missing.length > 0 && missing.length === runs.length;
    const end = `${settings.axis === "time_s" ? "" : `${settings.axis} `}${axisText(lastX)}`;
    const words = isNothing ? `No points in this range: the drawn runs end at ${end}. `
      : `No points in this range: ${missing.map((run) => run.name).join(", ")}. `;
    root.querySelector(".missing").replaceChildren(...(missing.length ? [words, wholeRun()] : []));
    root.classList.toggle("no-points", isNothing);
  };

  Board.curves = {
    title: "Curves",
    async update(panel, shared) {
      context = shared;
      if (!Board.smoothingWeights.includes(settings.smoothing)) settings.smoothing = NO_SMOOTHING;
      const answers = await Promise.all(shared.runs.map((run) => fetchSeries(shared, run)));
      const faults = await Promise.all(shared.runs.map((run) => shared.get(run, "faults")));
      if (!shared.isCurrent()) return;
      shared.runs.forEach((run, i) => lastAxes.set(run.key, answers[i].axes));
      const ends = answers.map(({ axes }, i) => (settings.axis === "step" ? shared.runs[i].step : axes[settings.axis]?.values.at(-1) ?? 0));
      lastX = Math.max(0, ...ends);
      const groups = grouped(answers);
      const shape = JSON.stringify(groups);
      if (!root || root.parentNode !== panel || root.dataset.shape !== shape) {
        charts.forEach((chart) => chart.plot && chart.plot.destroy());
        charts = new Map();
        root = element("div", { class: "curves" }, toolbar(), element("p", { class: "missing", role: "status" }));
        root.dataset.shape = shape;
        for (const [group, metrics] of groups) {
          // Rows of three, unless one card would be alone in its row.
          const columns = group === MAIN ? "main-cards" : metrics.length % 3 === 1 ? "small-cards" : "";
          const grid = element("div", { class: `cards ${columns}` });
          for (const [metric, title] of metrics) {
            const chart = card(metric, title);
            charts.set(metric, chart);
            grid.append(chart.box);
          }
          root.append(element("section", {}, element("h2", {}, group), grid));
        }
        if (!groups.length) root.append(Board.note(shared.runs.length ? "No step yet." : "Choose a run above."));
        panel.replaceChildren(root);
      }
      const inputs = root.querySelectorAll(".toolbar input");
      inputs.forEach((input, i) => {
        if (document.activeElement !== input) input.value = settings.range ? String(Math.round(settings.range[i])) : "";
      });
      root.querySelector(".reset").disabled = !settings.range;
      drawMissing(shared.runs, answers);
      const marks = shared.runs.map((run, i) => ({ run, faults: faults[i].faults, axes: answers[i].axes }));
      charts.forEach((chart) => draw(chart, shared.runs, answers, marks));
    },
  };
})();
