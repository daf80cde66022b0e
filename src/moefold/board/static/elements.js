// Elements and number formats. Texts of runs become text nodes, never HTML.
"use strict";

(() => {
  Board.element = (tag, attributes = {}, ...children) => {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "class") element.className = value;
      else if (name === "value") element.value = value;
      else if (typeof value === "boolean") element[name] = value;
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    }
    element.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return element;
  };

  // Four significant digits; large numbers with a unit of the metric system.
  Board.number = (value, digits = 4) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(3)).toExponential();
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(digits))}${letter}`;
    }
    return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 20 });
  };

  // All digits of a step or another count, in groups of three.
  Board.integer = (value) => value.toLocaleString("en-US", { maximumFractionDigits: 0 });

  Board.stepText = ([first, last]) =>
    first === last ? `step ${Board.integer(first)}` : `steps ${Board.integer(first)} to ${Board.integer(last)}`;

  Board.bytes = (value) => {
    for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
      if (value >= unit) return `${Number((value / unit).toPrecision(3))} ${name}`;
    }
    return `${value} B`;
  };

  Board.duration = (seconds) => {
    if (seconds === null || seconds === undefined) return "–";
    for (const [unit, name] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= unit) return `${Number((seconds / unit).toPrecision(2))} ${name}`;
    }
    return `${Math.round(seconds)} s`;
  };

  Board.variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Styles of runs, as run_styles.py numbers them: dash * NUM_COLORS + colour.
  const NUM_COLORS = 16;
  const DASHES = [[], [7, 3], [2, 3]];
  Board.color = (style) => Board.variable(`--run-${style % NUM_COLORS}`);
  Board.dash = (style) => DASHES[Math.floor(style / NUM_COLORS) % DASHES.length];

  // A swatch with the colour and dashes of a run; grey for a run that is not drawn.
  Board.swatch = (style) => {
    const swatch = Board.element("span", { class: "swatch" });
    if (style === null) return swatch;
    const color = `var(--run-${style % NUM_COLORS})`;
    const [on, off] = Board.dash(style);
    swatch.style.background = on ? `repeating-linear-gradient(90deg, ${color} 0 ${on / 2}px, transparent ${on / 2}px ${(on + off) / 2}px)` : color;
    return swatch;
  };

  // The swatch and the name of a run.
  Board.runLabel = (run) => Board.element("span", { class: "run-label" }, Board.swatch(run.style), run.name);

  // A select with a label; `options` are [value, text] pairs.
  Board.select = (label, options, value, onChange) => {
    const select = Board.element(
      "select",
      { onchange: () => onChange(select.value) },
      options.map(([key, text]) => Board.element("option", { value: key, selected: key === value }, text)),
    );
    return Board.element("label", { class: "field" }, Board.element("span", {}, label), select);
  };

  Board.note = (text) => Board.element("p", { class: "note" }, text);

  // A select of one of the chosen runs, for views that show one run at a time.
  Board.pickRun = (runs, key, onChange) =>
    Board.select("Run", runs.map((run) => [run.key, run.name]), key, onChange);

  // Linear interpolation of y at x; `xs` ascends. Beyond the ends, the last slope goes on.
  Board.interpolate = (xs, ys, x) => {
    if (xs.length === 0) return null;
    if (xs.length === 1) return ys[0];
    let low = 0;
    let high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] <= x) low = middle;
      else high = middle;
    }
    return ys[low] + ((ys[high] - ys[low]) * (x - xs[low])) / (xs[high] - xs[low]);
  };
})();
