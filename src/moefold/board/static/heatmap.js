// A heat map on a canvas that the mouse and the arrow keys explore.
"use strict";

(() => {
  const { element } = Board;

  // Blue below the mean, red above; near the mean as the page.
  const DIVERGING = {
    light: [[0, 33, 102, 172], [0.25, 146, 197, 222], [0.5, 247, 247, 247], [0.75, 244, 165, 130], [1, 178, 24, 43]],
    dark: [[0, 90, 160, 255], [0.25, 52, 92, 150], [0.5, 38, 40, 46], [0.75, 168, 78, 50], [1, 255, 138, 92]],
  };
  const SEQUENTIAL = {
    light: [[0, 250, 250, 246], [0.4, 253, 190, 110], [0.7, 232, 89, 47], [1, 128, 0, 38]],
    dark: [[0, 32, 34, 40], [0.4, 122, 62, 40], [0.7, 224, 110, 48], [1, 255, 224, 130]],
  };
  const NOTHING = { light: [30, 30, 34], dark: [0, 0, 0] };
  const UNKNOWN = { light: [222, 222, 226], dark: [70, 72, 80] };

  const between = (stops, position) => {
    const x = Math.max(0, Math.min(1, position));
    const high = Math.max(1, stops.findIndex(([at]) => at >= x));
    const [[a, ...from], [b, ...to]] = [stops[high - 1], stops[high]];
    return from.map((channel, i) => channel + ((to[i] - channel) * (x - a)) / (b - a));
  };

  const theme = () => (Board.isDark() ? "dark" : "light");

  // Colours of a byte of expert shares: 0 is an expert without tokens.
  Board.shareColor = (level) => (level === 0 ? NOTHING[theme()] : between(DIVERGING[theme()], (level - 1) / 254));

  // Colours of the load of a layer: 1 is even, 3 and more the end of the scale.
  Board.loadColor = (load) => (load === null ? UNKNOWN[theme()] : between(SEQUENTIAL[theme()], (load - 1) / 2));

  // Colours of a share of steps, 0 to 1.
  Board.partColor = (share) => between(SEQUENTIAL[theme()], share);

  const css = (rgb) => `rgb(${rgb.map(Math.round).join(" ")})`;

  // A bar of colours with its ends, and the colour of nothing.
  Board.colorBar = (color, from, to, texts, nothing = "") => {
    const steps = 9;
    const cells = Array.from({ length: steps }, (_, i) => {
      const cell = element("span", { class: "bar-cell" });
      cell.style.background = css(color(from + ((to - from) * i) / (steps - 1)));
      return cell;
    });
    const parts = [element("span", {}, texts[0]), element("span", { class: "bar" }, cells), element("span", {}, texts[1])];
    if (nothing) {
      const cell = element("span", { class: "bar-cell alone" });
      cell.style.background = css(color(0));
      parts.push(cell, element("span", {}, nothing));
    }
    return element("p", { class: "color-bar" }, parts);
  };

  // At most about `most` of `count` indices, at distances of 1, 2, 5, 10, 20, ...
  const tickIndices = (count, most) => {
    const wanted = count / most;
    const scale = 10 ** Math.floor(Math.log10(Math.max(1, wanted)));
    const distance = [1, 2, 5, 10].map((factor) => factor * scale).find((one) => one >= wanted) || 10 * scale;
    return Array.from({ length: Math.ceil(count / distance) }, (_, i) => i * distance);
  };

  // Texts at the middles of their rows or columns.
  const ticks = (name, side, count, most, text) => element("div", { class: name }, tickIndices(count, most).map((index) => {
    const tick = element("span", {}, text(index));
    tick.style[side] = `${(100 * (index + 0.5)) / count}%`;
    // In the middle of a narrow first column, a text would begin before the map.
    if (side === "left" && count > 2 * most && index === 0) tick.className = "first";
    return tick;
  }));

  const ROW_TICK_PX = 18;
  const MAX_COLUMN_TICKS = window.matchMedia("(max-width: 640px)").matches ? 3 : 8;

  // `rows` and `columns` are counts; `color(row, column)` gives a colour, `describe(row, column)` a text,
  // `rowText(row)` and `columnText(column)` the texts of the ticks.
  Board.heatmap = ({ title, rows, columns, color, describe, rowText, columnText, selectedRow = -1, onPick = null }) => {
    const canvas = element("canvas", {
      tabindex: "0", role: "img", "aria-label": `${title}; arrow keys move over the cells${onPick ? ", Enter picks the row" : ""}`,
    });
    const reading = element("p", { class: "reading", "aria-live": "polite" }, "\u00a0");
    let cell = null;

    const draw = () => {
      const width = canvas.clientWidth;
      const height = canvas.clientHeight;
      if (!width || !height) return;
      const scale = window.devicePixelRatio || 1;
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      const pixels = new ImageData(columns, rows);
      for (let row = 0; row < rows; row += 1) {
        for (let column = 0; column < columns; column += 1) {
          const [red, green, blue] = color(row, column);
          pixels.data.set([red, green, blue, 255], 4 * (row * columns + column));
        }
      }
      const small = document.createElement("canvas");
      small.width = columns;
      small.height = rows;
      small.getContext("2d").putImageData(pixels, 0, 0);
      const target = canvas.getContext("2d");
      target.imageSmoothingEnabled = false;
      target.drawImage(small, 0, 0, canvas.width, canvas.height);
      target.strokeStyle = Board.variable("--ink");
      target.lineWidth = 1.5 * scale;
      const box = (row, column, span) => target.strokeRect(
        (canvas.width * column) / columns, (canvas.height * row) / rows, (canvas.width * span) / columns, canvas.height / rows);
      if (selectedRow >= 0) box(selectedRow, 0, columns);
      if (cell) box(cell[0], cell[1], 1);
    };

    const show = (row, column) => {
      cell = [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
      reading.textContent = describe(...cell);
      draw();
    };

    const cellAt = (event) => {
      const box = canvas.getBoundingClientRect();
      return [
        Math.floor(((event.clientY - box.top) / box.height) * rows),
        Math.floor(((event.clientX - box.left) / box.width) * columns),
      ];
    };

    canvas.addEventListener("mousemove", (event) => show(...cellAt(event)));
    canvas.addEventListener("click", (event) => {
      show(...cellAt(event));
      if (onPick) onPick(cell[0]);
    });
    canvas.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
      if (event.key === "Enter" && onPick && cell) onPick(cell[0]);
      if (!(event.key in moves)) return;
      event.preventDefault();
      const [down, right] = moves[event.key];
      show(...(cell ? [cell[0] + down, cell[1] + right] : [0, 0]));
    });
    const height = Math.max(72, Math.min(420, rows * (rows <= 16 ? 18 : 8)));
    canvas.style.height = `${height}px`;
    new ResizeObserver(draw).observe(canvas);

    return element("figure", { class: "heatmap" },
      element("figcaption", {}, title),
      element("div", { class: "map" },
        ticks("row-texts", "top", rows, height / ROW_TICK_PX, rowText),
        canvas),
      ticks("column-texts", "left", columns, MAX_COLUMN_TICKS, columnText),
      reading);
  };
})();
