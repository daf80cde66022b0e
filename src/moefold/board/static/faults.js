// The view of faults: when they happened in each run, and what each was.
"use strict";

(() => {
  const { element } = Board;
  const KINDS = ["nonfinite", "spike", "divergence", "straggler", "data", "reward", "mismatch"];
  const state = { kind: "" };
  const opened = new Set();

  const kindIndex = (kind) => (KINDS.includes(kind) ? KINDS.indexOf(kind) : KINDS.length);

  const timeline = (run, faults, lastStep) => {
    const strip = element("div", { class: "timeline", role: "img",
      "aria-label": `${run.name}: ${faults.length} faults in ${lastStep} steps` });
    for (const fault of faults) {
      if (!Number.isFinite(fault.step)) continue;
      const mark = element("span", { class: `fault kind-${kindIndex(fault.kind)}`, title: `step ${Board.integer(fault.step)}: ${fault.kind}` });
      mark.style.left = `${(100 * fault.step) / Math.max(1, lastStep)}%`;
      strip.append(mark);
    }
    return element("div", { class: "timeline-row" }, element("span", { class: "timeline-name" }, Board.runLabel(run)), strip,
      element("span", { class: "muted" }, String(faults.length)));
  };

  const happened = (fault) => (Number.isFinite(fault.time_s) ? new Date(fault.time_s * 1000).toLocaleString() : "");

  // The description of a fault, or its first fields.
  const words = (fault) => {
    if (fault.what) return String(fault.what);
    if (fault.kind === "straggler") return `rank ${fault.rank} on ${fault.host}`;
    const others = Object.entries(fault).filter(([key]) => !["time_s", "step", "kind", "action"].includes(key));
    return others.slice(0, 3).map(([key, value]) => `${key}: ${JSON.stringify(value).slice(0, 120)}`).join(", ") || "details";
  };

  const row = (run, fault, index) => {
    const key = `${run.key}:${index}`;
    const details = element("details", { ontoggle: () => (details.open ? opened.add(key) : opened.delete(key)) },
      element("summary", {}, words(fault)),
      element("pre", {}, JSON.stringify(fault, null, 2)));
    details.open = opened.has(key);
    return element("tr", {},
      element("td", {}, Board.runLabel(run)),
      element("td", { class: "right" }, Number.isFinite(fault.step) ? Board.integer(fault.step) : "–"),
      element("td", {}, element("span", { class: `chip kind-${kindIndex(fault.kind)}` }, String(fault.kind ?? "fault"))),
      element("td", {}, String(fault.action ?? "")),
      element("td", {}, details),
      element("td", { class: "muted" }, happened(fault)));
  };

  Board.faults = {
    title: "Faults",
    async update(panel, shared) {
      const answers = await Promise.all(shared.runs.map((run) => shared.get(run, "faults")));
      if (!shared.isCurrent()) return;
      const lastStep = Math.max(1, ...shared.runs.map((run) => run.step));
      const found = shared.runs.flatMap((run, i) => {
        const skipped = answers[i].total - answers[i].faults.length;
        return answers[i].faults.map((fault, j) => ({ run, fault, index: skipped + j }));
      });
      const kinds = [...new Set(found.map(({ fault }) => String(fault.kind ?? "fault")))].sort();
      const shown = found.filter(({ fault }) => !state.kind || String(fault.kind) === state.kind);
      shown.sort((a, b) => (b.fault.time_s || 0) - (a.fault.time_s || 0));
      const parts = [];
      if (!shared.runs.length) parts.push(Board.note("Choose a run above."));
      else if (!found.length) parts.push(Board.note("No fault in the chosen runs."));
      else {
        const wasFocused = document.activeElement?.closest?.(".toolbar") && panel.contains(document.activeElement);
        parts.push(element("div", { class: "toolbar" }, Board.select(
          "Kind", [["", "all"], ...kinds.map((kind) => [kind, kind])], state.kind, (kind) => {
            state.kind = kind;
            shared.refresh();
          })));
        shared.runs.forEach((run) => parts.push(
          timeline(run, shown.filter((one) => one.run === run).map((one) => one.fault), lastStep)));
        parts.push(element("div", { class: "timeline-ends muted" }, element("span", {}, "step 0"), element("span", {}, `step ${Board.integer(lastStep)}`)));
        parts.push(element("div", { class: "scroll" }, element("table", { class: "faults" },
          element("thead", {}, element("tr", {}, ["run", "step", "kind", "action", "what", "time"].map((text) => element("th", { scope: "col" }, text)))),
          element("tbody", {}, shown.slice(0, 500).map(({ run, fault, index }) => row(run, fault, index))))));
        panel.replaceChildren(...parts);
        if (wasFocused) panel.querySelector(".toolbar select").focus();
        return;
      }
      panel.replaceChildren(...parts);
    },
  };
})();
