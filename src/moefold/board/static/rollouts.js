// The view of rollouts: texts with rewards, searched on the server, newest first.
"use strict";

(() => {
  const { element, number } = Board;
  const PAGE = "20";
  const state = { run: null, text: "", step: "", min_reward: "", max_reward: "", pages: [], next: null, total: null, shown: "" };

  const query = () => {
    const parts = { limit: PAGE };
    for (const name of ["text", "step", "min_reward", "max_reward"]) if (state[name] !== "") parts[name] = state[name];
    return parts;
  };

  // Text with the found parts marked; text nodes only.
  const marked = (text, search) => {
    if (!search) return [text];
    const parts = [];
    const lower = text.toLowerCase();
    const wanted = search.toLowerCase();
    let from = 0;
    // A letter whose lower case is longer would shift the places: such a text stays unmarked.
    for (let at = lower.length === text.length ? lower.indexOf(wanted) : -1; at >= 0; at = lower.indexOf(wanted, from)) {
      parts.push(text.slice(from, at), element("mark", {}, text.slice(at, at + wanted.length)));
      from = at + wanted.length;
    }
    return [...parts, text.slice(from)];
  };

  const message = (part, kind) => element("div", { class: `message ${kind}` },
    element("span", { class: "role" }, part.role || kind),
    element("pre", {}, marked(part.text, state.text), part.left_out ? element("em", {}, ` … ${part.left_out} more characters`) : null));

  const rollout = (one) => element("article", { class: "card rollout" },
    element("p", { class: "facts" },
      element("strong", { class: one.reward > 0 ? "good" : "" }, `reward ${number(one.reward)}`),
      one.adjusted_reward !== null && one.adjusted_reward !== one.reward ? element("span", {}, `adjusted ${number(one.adjusted_reward)}`) : null,
      element("span", {}, `step ${one.step ?? "–"}`),
      element("span", {}, `prompt ${one.prompt_number ?? "–"}, sample ${one.sample_number ?? "–"}`),
      element("span", {}, `${one.tokens ?? "–"} tokens`),
      element("span", {}, one.finish_reason),
      element("span", {}, `log p ${number(one.log_prob)}`)),
    one.prompt.map((part) => message(part, "prompt")),
    one.completion.map((part) => message(part, "completion")));

  Board.rollouts = {
    title: "Rollouts",
    async update(panel, shared) {
      const candidates = shared.runs.filter((run) => run.num_rollouts > 0);
      const run = candidates.find((one) => one.key === state.run) || candidates[0];
      if (!run) {
        panel.replaceChildren(Board.note(shared.runs.length
          ? "No rollouts in the chosen runs: reinforcement learning writes them with metrics.rollouts_every."
          : "Choose a run above."));
        state.shown = "";
        return;
      }
      if (state.shown === run.key && panel.querySelector(".rollout-list")) {
        // Texts stay in place while they are read; the button shows that there are newer ones.
        const fresh = run.num_rollouts - state.total;
        const button = panel.querySelector(".fresh");
        button.hidden = fresh <= 0;
        button.textContent = `Show ${fresh} new rollouts`;
        return;
      }
      const list = element("div", { class: "rollout-list" });
      const counted = element("p", { class: "note", role: "status" }, "");
      const more = element("button", { type: "button", onclick: () => load(state.next) }, "Older rollouts");
      const fresh = element("button", { type: "button", class: "fresh", hidden: true, onclick: () => load(null) }, "");
      const load = async (before) => {
        const parts = query();
        if (before !== null) parts.before = before;
        let answer;
        try {
          answer = await Board.source.answer(run.key, "rollouts", parts);
        } catch (error) {
          counted.textContent = String(error.message);
          return;
        }
        if (before === null) list.replaceChildren();
        list.append(...answer.rollouts.map(rollout));
        state.next = answer.before;
        state.total = run.num_rollouts = answer.total;
        fresh.hidden = true;
        more.hidden = answer.before === null;
        more.textContent = answer.rollouts.length ? "Older rollouts" : "Search older rollouts";
        const of = answer.exported === undefined ? `${answer.total} rollouts` : `the newest ${answer.exported} of ${answer.total} rollouts`;
        counted.textContent = `${list.childElementCount} shown, of ${of}${answer.before === null ? "" : "; there are older ones"}`;
      };
      const field = (name, label, type) => {
        const input = element("input", { type, value: state[name], step: "any", onchange: () => {
          state[name] = input.value;
          load(null);
        } });
        return element("label", { class: "field" }, element("span", {}, label), input);
      };
      panel.replaceChildren(
        element("form", { class: "toolbar", onsubmit: (event) => event.preventDefault() },
          Board.pickRun(candidates, run.key, (key) => {
            state.run = key;
            state.shown = "";
            shared.refresh();
          }),
          field("text", "Search", "search"), field("step", "Step", "number"),
          field("min_reward", "Reward from", "number"), field("max_reward", "to", "number")),
        counted, fresh, list, more);
      state.shown = run.key;
      await load(null);
    },
  };
})();
