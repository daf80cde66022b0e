// The view of curves: one chart a metric, all chosen runs in it.
"use strict";

(() => {
  const { element, number } = Board;

  // Group, and metrics with their titles; metrics of no entry come last under their names.
  const GROUPS = [
    ["Training", {
      loss: "loss, nats", eval_loss: "held-out loss, nats", grad_norm: "gradient norm", lr: "learning rate",
    }],
    ["Reinforcement learning", {
      "rl.reward": "reward", "rl.eval_reward": "held-out reward", "rl.kl": "KL to the reference, nats",
      "rl.entropy": "entropy, nats", "rl.length_mean": "length, tokens", "rl.solved": "solved groups",
      "rl.mixed_groups": "groups with two rewards", "rl.truncated": "truncated", "rl.clipped": "clipped tokens",
      "rl.ratio_max": "largest ratio", "rl.mismatch_mean": "mismatch of sampler, nats", "rl.rollout_s": "sampling, s",
      "rl.rollout_tokens_per_s": "sampled tokens/s",
    }],
    ["Speed", {
      tokens_per_s: "tokens/s", mfu: "MFU", tflops_per_rank: "TFLOP/s of a rank", step_time_s: "step, s",
      save_s: "blocked by saving, s",
    }],
    ["Experts", {
      worst_expert_load: "busiest expert over mean", dropped_fraction: "dropped tokens",
      aux_loss: "load-balancing loss", z_loss: "router z loss",
    }],
    ["Memory and ranks", {
      memory_gib: "peak memory of a rank, GiB", "rank_times.own_max_s": "work of the slowest rank, s",
      "rank_times.own_median_s": "work of the median rank, s", "rank_times.slowest_rank": "slowest rank",
      "rank_times.wait_median_s": "wait of the median rank, s", "rank_times.data_max_s": "longest data loading, s",
    }],
  ];
  const rest = (name) => name.slice(name.indexOf(".") + 1).replaceAll("_", " ");
  // Groups of the metrics that are not listed.
  const PREFIXES = [
    ["rl.", "Reinforcement learning", rest], ["loss_", "Parts of the loss", rest], ["rank_times.", "Memory and ranks", rest],
    ["offload.", "Memory and ranks", (name) => `offload: ${rest(name)}`], ["attention_", "Attention", (name) => name],
    ["replicas.", "Replicas", rest], ["", "Others", (name) => name],
  ];
  // Shown in tables of other views, or steps of the axis.
  const HIDDEN = new Set(["tokens"]);
  const AXES = [["step", "step"], ["tokens", "tokens"], ["time_s", "training time"]];
  const SMOOTHING = [["0", "none"], ["0.6", "0.6"], ["0.9", "0.9"], ["0.97", "0.97"]];
  const FEW_POINTS = 30;
  const HEIGHT = 210;

  const settings = { axis: "step", smoothing: "0", range: null, log: new Set(), wide: new Set() };
  let charts = new Map();
  let root = null;

  const isWorthShowing = (metric, answers) =>
    answers.some(({ series }) => series[metric] && series[metric].values.some((value) => value !== null && value !== 0)) ||
    (metric === "loss" && answers.some(({ series }) => series[metric]));

  const grouped = (answers) => {
    const names = new Set(answers.flatMap(({ series }) => Object.keys(series)));
    const listed = new Set(GROUPS.flatMap(([, metrics]) => Object.keys(metrics)));
    const groups = new Map(GROUPS.map(([group, metrics]) => [group, Object.entries(metrics)]));
    for (const name of [...names].filter((one) => !listed.has(one) && !HIDDEN.has(one)).sort()) {
      const [, group, title] = PREFIXES.find(([prefix]) => name.startsWith(prefix));
      groups.set(group, [...(groups.get(group) || []), [name, title(name)]]);
    }
    return [...groups]
      .map(([group, metrics]) => [group, metrics.filter(([metric]) => names.has(metric) && isWorthShowing(metric, answers))])
      .filter(([, metrics]) => metrics.length);
  };

  // Exponential moving average without a bias at the start; gaps stay gaps.
  const smooth = (values, weight) => {
    let sum = 0;
    let total = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = weight * sum + (1 - weight) * value;
      total = weight * total + (1 - weight);
      return sum / total;
    });
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
    const kept = xs.map((x, i) => i === 0 || x > xs[i - 1]);
    const columns = [xs, found.values].map((column) => column.filter((_, i) => kept[i]));
    return settings.smoothing === "0" ? columns : [...columns, smooth(columns[1], Number(settings.smoothing))];
  };

  const aligned = (metric, runs, answers) => {
    const tables = answers.map((answer) => table(metric, answer));
    const shown = runs.map((run, i) => [run, tables[i]]).filter(([, columns]) => columns);
    return { runs: shown.map(([run]) => run), tables: shown.map(([, columns]) => columns) };
  };

  const axisLabel = (value) => {
    if (value === null || value === undefined) return "–";
    if (settings.axis === "time_s") return Board.duration(value);
    return number(value);
  };

  const seriesOf = (run, columns) => {
    const color = Board.color(run.slot);
    const known = columns[1].filter((value) => value !== null).length;
    // Without a cursor the legend has the last values.
    const value = (u, current, series, index) => number(index === null ? u.data[series].findLast((y) => y != null) : current);
    const line = { label: run.name, stroke: color, width: 1.6, value };
    line.points = { show: known <= FEW_POINTS, size: 5, fill: color };
    if (columns.length === 2) return [line];
    return [{ ...line, stroke: `${color}55`, width: 1, class: "raw", points: { show: false } }, line];
  };

  // Marks at the foot of a chart where a run has faults.
  const faultMarks = (chart) => (u) => {
    const context = u.ctx;
    context.save();
    for (const { run, faults, axes } of chart.faults) {
      context.fillStyle = Board.color(run.slot);
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

  const options = (metric, title, width, chart, series) => ({
    width,
    height: HEIGHT,
    padding: [10, 14, 0, 0],
    series: [{ label: settings.axis === "time_s" ? "time" : settings.axis, 
      value: (u, x, series, index) => axisLabel(index === null ? u.data[0].at(-1) : x) }, ...series],
    scales: {
      x: { time: false, range: (u, low, high) => settings.range || (low === high ? [low - 1, high + 1] : [low, high]) },
      y: { distr: settings.log.has(metric) ? 3 : 1 },
    },
    axes: [
      { stroke: Board.variable("--muted"), grid: { stroke: Board.variable("--grid"), width: 1 }, ticks: { show: false },
        values: (u, values) => values.map(axisLabel), space: 60, size: 28, font: "11px system-ui, sans-serif" },
      { stroke: Board.variable("--muted"), grid: { stroke: Board.variable("--grid"), width: 1 }, ticks: { show: false },
        values: (u, values) => values.map((value) => (value === null ? null : number(value))), size: 54,
        font: "11px system-ui, sans-serif" },
    ],
    // Charts share the place of the mouse, and not the selection: each would zoom by itself.
    cursor: { sync: { key: "board", filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
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

  let context = null;

  const zoom = (range) => {
    settings.range = range;
    context.refresh();
  };

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

  const draw = (chart, runs, answers, faults) => {
    const { metric, title, place } = chart;
    const shown = aligned(metric, runs, answers);
    chart.faults = faults;
    const width = place.clientWidth;
    if (!width) return;
    const data = shown.tables.length ? uPlot.join(shown.tables) : [[]];
    const shape = JSON.stringify([
      shown.runs.map((run) => [run.key, run.slot]), shown.tables.map((one) => [one.length, one[0].length <= FEW_POINTS]),
      settings.axis, settings.log.has(metric), Board.isDark(), width,
    ]);
    if (chart.plot && chart.shape === shape) {
      chart.plot.setData(data);
      return;
    }
    if (chart.plot) chart.plot.destroy();
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
          context.refresh();
        } }, text);
      return button;
    };
    const box = element("article", { class: `card ${settings.wide.has(metric) ? "wide" : ""}` },
      element("div", { class: "card-head" }, element("h3", { title: metric }, title),
        toggle(settings.log, "log", "Logarithmic scale"), toggle(settings.wide, "wide", "Full width")),
      place);
    const chart = { metric, title, place, box, plot: null, shape: "", faults: [] };
    return chart;
  };

  const toolbar = () => {
    const bound = (index, label) => {
      const value = settings.range ? String(Math.round(settings.range[index])) : "";
      const input = element("input", { type: "number", min: "0", value, placeholder: index ? "end" : "start",
        onchange: () => {
          const [low, high] = [...root.querySelectorAll(".toolbar input")].map((one) => one.value);
          if (low !== "" && high !== "" && Number(low) < Number(high)) zoom([Number(low), Number(high)]);
        } });
      return element("label", { class: "field" }, element("span", {}, label), input);
    };
    return element("div", { class: "toolbar" },
      Board.select("Over", AXES, settings.axis, (axis) => {
        settings.axis = axis;
        settings.range = null;
        context.refresh();
      }),
      Board.select("Smoothing", SMOOTHING, settings.smoothing, (weight) => {
        settings.smoothing = weight;
        context.refresh();
      }),
      bound(0, "From"), bound(1, "To"),
      element("button", { type: "button", class: "small reset", onclick: () => zoom(null) }, "Whole run"));
  };

  // Steps of the visible range, for finer points from the server; the axes of the last answer map tokens and time.
  const query = (key) => {
    if (!settings.range || !Board.source.isLive) return {};
    let [low, high] = settings.range;
    if (settings.axis !== "step") {
      const axis = lastAxes.get(key)?.[settings.axis];
      if (!axis) return {};
      [low, high] = [low, high].map((x) => Board.interpolate(axis.values, axis.steps, x));
    }
    return { first: Math.max(0, Math.floor(low)), last: Math.max(0, Math.ceil(high)) };
  };
  const lastAxes = new Map();

  Board.curves = {
    title: "Curves",
    async update(panel, shared) {
      context = shared;
      const answers = await Promise.all(shared.runs.map((run) => shared.get(run, "series", query(run.key))));
      const faults = await Promise.all(shared.runs.map((run) => shared.get(run, "faults")));
      if (!shared.isCurrent()) return;
      shared.runs.forEach((run, i) => lastAxes.set(run.key, answers[i].axes));
      const groups = grouped(answers);
      const shape = JSON.stringify(groups);
      if (!root || root.parentNode !== panel || root.dataset.shape !== shape) {
        charts.forEach((chart) => chart.plot && chart.plot.destroy());
        charts = new Map();
        root = element("div", { class: "curves" }, toolbar());
        root.dataset.shape = shape;
        for (const [group, metrics] of groups) {
          const grid = element("div", { class: "cards" });
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
      const marks = shared.runs.map((run, i) => ({ run, faults: faults[i].faults, axes: answers[i].axes }));
      charts.forEach((chart) => draw(chart, shared.runs, answers, marks));
    },
  };
})();
