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
  Board.number = (value) => {
    if (value === null || value === undefined || Number.isNaN(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e15 || (size > 0 && size < 1e-3)) return value.toExponential(2);
    for (const [unit, letter] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (size >= unit) return `${Number((value / (letter === "k" ? 1e3 : unit)).toPrecision(4))}${letter}`;
    }
    return String(Number(value.toPrecision(4)));
  };

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

  Board.color = (index) => getComputedStyle(document.documentElement).getPropertyValue(`--run-${index % 8}`).trim();

  Board.variable = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A colour swatch and the name of a run.
  Board.runLabel = (run) =>
    Board.element("span", { class: "run-label" }, Board.element("span", { class: `swatch run-${run.slot}` }), run.name);

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
