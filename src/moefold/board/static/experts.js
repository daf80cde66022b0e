// The view of experts: load of layers over steps, of layers and experts at some steps, of the experts of a layer.
"use strict";

(() => {
  const { element } = Board;
  const state = { run: null, layer: 0, range: null };

  const decode = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

  const share = (level, maxLog2) => (level === 0 ? 0 : 2 ** (((level - 1) / 127 - 1) * maxLog2));

  const shareText = (level, maxLog2) =>
    level === 0 ? "no token" : `${share(level, maxLog2).toFixed(2)} times the mean`;

  const layerMap = ({ numbers, steps, load, dropped_fraction: dropped, router_entropy: entropy }, redraw) => Board.heatmap({
    title: "Busiest expert of each layer over the mean, over steps",
    rows: numbers.length,
    columns: steps.length,
    color: (row, column) => Board.loadColor(load[column][row]),
    describe: (row, column) =>
      `layer ${numbers[row]}, ${Board.stepText(steps[column])}: load ${Board.number(load[column][row])}, dropped ` +
      `${Board.number(dropped[column][row])}, entropy ${Board.number(entropy[column][row])}`,
    rowText: (row) => `layer ${numbers[row]}`,
    columnText: (column) => `step ${Board.integer(steps[column][0])}`,
    selectedRow: state.layer,
    onPick: (row) => {
      state.layer = row;
      redraw();
    },
  });

  const expertMaps = (experts, redraw) => {
    const { numbers, num_experts: count, steps, max_log2_share: maxLog2 } = experts;
    const levels = decode(experts.shares);
    const level = (range, layer, expert) => levels[(range * numbers.length + layer) * count + expert];
    const layer = Math.min(state.layer, numbers.length - 1);
    const range = state.range === null ? steps.length - 1 : Math.min(state.range, steps.length - 1);

    const overLayers = () => Board.heatmap({
      title: `Tokens of each layer and expert over the mean, ${Board.stepText(steps[range])}`,
      rows: numbers.length,
      columns: count,
      color: (row, column) => Board.shareColor(level(range, row, column)),
      describe: (row, column) => `layer ${numbers[row]}, expert ${column}: ${shareText(level(range, row, column), maxLog2)}`,
      rowText: (row) => `layer ${numbers[row]}`,
      columnText: (column) => `expert ${column}`,
      selectedRow: layer,
      onPick: (row) => {
        state.layer = row;
        redraw();
      },
    });
    const overSteps = Board.heatmap({
      title: `Experts of layer ${numbers[layer]} over steps`,
      rows: count,
      columns: steps.length,
      color: (row, column) => Board.shareColor(level(column, layer, row)),
      describe: (row, column) =>
        `layer ${numbers[layer]}, expert ${row}, ${Board.stepText(steps[column])}: ${shareText(level(column, layer, row), maxLog2)}`,
      rowText: (row) => `expert ${row}`,
      columnText: (column) => `step ${Board.integer(steps[column][0])}`,
    });
    const slider = element("input", { type: "range", min: "0", max: String(steps.length - 1), value: String(range),
      oninput: () => {
        state.range = Number(slider.value) === steps.length - 1 ? null : Number(slider.value);
        redraw();
      } });
    slider.id = "range-slider";
    return [
      element("div", { class: "toolbar" },
        element("label", { class: "field grow" }, element("span", {}, `At ${Board.stepText(steps[range])}`), slider),
        Board.select("Layer", numbers.map((n, i) => [String(i), String(n)]), String(layer), (value) => {
          state.layer = Number(value);
          redraw();
        })),
      Board.colorBar(Board.shareColor, 1, 255, ["1/4 of the mean", "4 times"], "no token"),
      overLayers(),
      overSteps,
      experts.is_sampled ? Board.note("The files are large: the counts are of a part of the steps or of their samples.") : null,
    ];
  };

  Board.experts = {
    title: "Experts",
    async update(panel, shared) {
      const run = shared.runs.find((one) => one.key === state.run) || shared.runs[0];
      if (!run) {
        panel.replaceChildren(Board.note("Choose a run above."));
        return;
      }
      const answer = await shared.get(run, "experts");
      if (!shared.isCurrent()) return;
      const redraw = () => {
        const focused = document.activeElement?.id;
        const parts = [
          element("div", { class: "toolbar" }, Board.pickRun(shared.runs, run.key, (key) => {
            state.run = key;
            state.range = null;
            shared.refresh();
          })),
        ];
        if (answer.layers) {
          parts.push(Board.colorBar(Board.loadColor, 1, 3, ["even", "3 times the mean"]), layerMap(answer.layers, redraw));
        }
        if (answer.experts) parts.push(...expertMaps(answer.experts, redraw));
        else if (answer.layers) parts.push(Board.note("The experts were not counted: set metrics.expert_counts_every = 1, or moe.trace_every."));
        else parts.push(Board.note("No step of a model with experts yet."));
        panel.replaceChildren(...parts.filter(Boolean));
        if (focused) document.getElementById(focused)?.focus();
      };
      redraw();
    },
  };
})();
