// The view of recipes: settings of the chosen runs, those that differ first.
"use strict";

(() => {
  const { element } = Board;
  const state = { all: "0", text: "" };

  const shown = (value) => (value === undefined ? "–" : typeof value === "string" && value ? value : JSON.stringify(value));

  const table = (runs, settings) => {
    const keys = [...new Set(settings.flatMap((one) => Object.keys(one)))].sort();
    const differs = (key) => new Set(settings.map((one) => JSON.stringify(one[key]))).size > 1;
    const kept = keys.filter((key) => (state.all === "1" || differs(key)) && key.includes(state.text.trim()));
    if (!kept.length) return Board.note(runs.length > 1 ? "The recipes do not differ." : "No setting of this name.");
    return element("div", { class: "scroll" }, element("table", { class: state.all === "1" ? "recipes all" : "recipes" },
      element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "key"), runs.map((run) => element("th", { scope: "col" }, Board.runLabel(run))))),
      element("tbody", {}, kept.map((key) => element("tr", { class: differs(key) ? "differs" : "" },
        element("th", { scope: "row" }, key), settings.map((one) => element("td", {}, shown(one[key]))))))));
  };

  Board.recipes = {
    title: "Recipes",
    async update(panel, shared) {
      const answers = await Promise.all(shared.runs.map((run) => shared.get(run, "recipe")));
      if (!shared.isCurrent()) return;
      if (!shared.runs.length) {
        panel.replaceChildren(Board.note("Choose a run above."));
        return;
      }
      if (shared.runs.length === 1) state.all = "1";
      const place = element("div", {});
      const redraw = () => place.replaceChildren(table(shared.runs, answers.map((one) => one.settings)));
      const search = element("input", { type: "search", value: state.text, oninput: () => {
        state.text = search.value;
        redraw();
      } });
      if (panel.querySelector(".recipes-search") && panel.dataset.recipes === JSON.stringify([shared.runs.map((run) => run.key), answers])) return;
      panel.dataset.recipes = JSON.stringify([shared.runs.map((run) => run.key), answers]);
      redraw();
      panel.replaceChildren(element("div", { class: "toolbar recipes-search" },
        Board.select("Keys", [["0", "that differ"], ["1", "all"]], state.all, (all) => {
          state.all = all;
          redraw();
        }),
        element("label", { class: "field" }, element("span", {}, "Key has"), search)), place);
    },
  };
})();
