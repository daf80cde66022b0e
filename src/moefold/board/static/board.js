// The page: the list of runs, the tabs, and the loop that follows the runs.
"use strict";

(() => {
  const { element } = Board;
  const VIEWS = ["curves", "experts", "memory", "ranks", "faults", "rollouts", "recipes"];
  const MAX_CHOSEN = 8;
  const DEFAULT_CHOSEN = 4;
  const POLL_MS = 2000;
  const BUSY_FACTOR = 5;

  const state = { runs: [], chosen: null, slots: new Map(), view: "curves", filter: "", turn: 0, cache: new Map() };
  const place = Object.fromEntries(["status", "theme", "runs", "tabs", "panel"].map((id) => [id, document.getElementById(id)]));

  // --- address: the view and the chosen runs, so that a link shows the same ---
  const readAddress = () => {
    const parts = new URLSearchParams(window.location.hash.slice(1));
    if (VIEWS.includes(parts.get("view"))) state.view = parts.get("view");
    if (parts.has("runs")) state.chosen = parts.get("runs").split(",").filter(Boolean).slice(0, MAX_CHOSEN);
  };

  const writeAddress = () => {
    const parts = new URLSearchParams({ view: state.view, runs: state.chosen.join(",") });
    window.history.replaceState(null, "", `#${parts}`);
  };

  // --- chosen runs keep their colours ---
  const chooseSlots = () => {
    for (const key of [...state.slots.keys()]) if (!state.chosen.includes(key)) state.slots.delete(key);
    for (const key of state.chosen) {
      if (state.slots.has(key)) continue;
      const taken = new Set(state.slots.values());
      state.slots.set(key, [...Array(MAX_CHOSEN).keys()].find((slot) => !taken.has(slot)));
    }
  };

  const chosenRuns = () =>
    state.runs.filter((run) => state.chosen.includes(run.key)).map((run) => ({ ...run, slot: state.slots.get(run.key) }));

  const setChosen = (key, isChosen) => {
    state.chosen = isChosen ? [...state.chosen, key] : state.chosen.filter((one) => one !== key);
    chooseSlots();
    writeAddress();
    poll();
  };

  // --- list of runs ---
  const progress = (run) => {
    if (run.has_more && state.chosen.includes(run.key)) return `reading, ${Math.floor(100 * run.read)} %`;
    return run.steps ? `${run.step} of ${run.steps}` : String(run.step);
  };

  const runRow = (run) => {
    const isChosen = state.chosen.includes(run.key);
    const box = element("input", { type: "checkbox", id: `run-${run.key}`, checked: isChosen,
      disabled: !isChosen && state.chosen.length >= MAX_CHOSEN, onchange: () => setChosen(run.key, box.checked) });
    const swatch = isChosen ? `swatch run-${state.slots.get(run.key)}` : "swatch";
    return element("tr", {},
      element("td", {}, element("label", { class: "run-label", title: run.path, for: box.id }, box, element("span", { class: swatch }), run.name),
        run.problems.length && isChosen ? element("ul", { class: "problems" }, run.problems.map((text) => element("li", {}, text))) : null),
      element("td", {}, element("span", { class: `state ${run.state}` }, run.state)),
      element("td", { class: "right" }, progress(run)),
      element("td", { class: "right" }, Board.number(run.reward ?? run.loss), run.reward === null ? "" : " reward"),
      element("td", { class: "right narrow-off" }, Board.number(run.eval_loss)),
      element("td", { class: "right narrow-off" }, Board.number(run.tokens_per_s)),
      element("td", { class: "narrow-off" }, run.mapping),
      element("td", { class: "right narrow-off" }, run.num_faults ? String(run.num_faults) : ""),
      element("td", { class: "right narrow-off" }, Board.source.isLive ? Board.duration(run.age_s) : ""));
  };

  const HEADINGS = [["run", ""], ["state", ""], ["step", "right"], ["loss", "right"], ["held-out", "right narrow-off"],
    ["tokens/s", "right narrow-off"], ["mapping", "narrow-off"], ["faults", "right narrow-off"], ["last step", "right narrow-off"]];

  const drawRuns = () => {
    const focused = document.activeElement?.id;
    const runs = state.runs.filter((run) => run.name.toLowerCase().includes(state.filter.toLowerCase()));
    const table = element("div", { class: "scroll" }, element("table", { class: "run-table" },
      element("thead", {}, element("tr", {}, HEADINGS.map(([text, name]) => element("th", { scope: "col", class: name }, text)))),
      element("tbody", {}, runs.map(runRow))));
    const old = place.runs.querySelector(".scroll");
    if (old) {
      const top = old.scrollTop;
      old.replaceWith(table);
      table.scrollTop = top;
    } else {
      if (state.runs.length > 6) {
        const input = element("input", { type: "search", oninput: () => {
          state.filter = input.value;
          drawRuns();
        } });
        place.runs.append(element("label", { class: "field" }, element("span", {}, "Name has"), input));
      }
      place.runs.append(table);
    }
    if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
  };

  // --- tabs ---
  const show = (view) => {
    state.view = view;
    for (const tab of place.tabs.children) {
      const isShown = tab.id === `tab-${view}`;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1;
    }
    place.panel.setAttribute("aria-labelledby", `tab-${view}`);
    writeAddress();
    place.panel.replaceChildren();
    refresh();
  };

  const drawTabs = () => {
    place.tabs.append(...VIEWS.map((view) => element("button", { type: "button", role: "tab", id: `tab-${view}`, "aria-controls": "panel",
      onclick: () => show(view) }, Board[view].title)));
    place.tabs.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1 };
      if (!(event.key in moves)) return;
      const next = VIEWS[(VIEWS.indexOf(state.view) + moves[event.key] + VIEWS.length) % VIEWS.length];
      show(next);
      document.getElementById(`tab-${next}`).focus();
    });
  };

  // --- the view ---
  // An answer stays valid until the version of its run changes.
  const get = async (run, name, query = {}) => {
    const address = `${run.key}/${name}?${new URLSearchParams(query)}`;
    const known = state.cache.get(address);
    if (known && known.version === run.version) return known.answer;
    const answer = await Board.source.answer(run.key, name, query);
    for (const other of [...state.cache.keys()]) if (other.startsWith(`${run.key}/${name}?`)) state.cache.delete(other);
    state.cache.set(address, { version: run.version, answer });
    return answer;
  };

  const refresh = async () => {
    state.turn += 1;
    const turn = state.turn;
    const shared = { runs: chosenRuns(), get, refresh, isCurrent: () => turn === state.turn };
    try {
      await Board[state.view].update(place.panel, shared);
      place.panel.dataset.ready = state.view;
    } catch (error) {
      if (shared.isCurrent()) say(`cannot draw: ${error.message}`, true);
    }
  };

  const say = (text, isBad = false) => {
    place.status.textContent = text;
    place.status.classList.toggle("bad", isBad);
  };

  // --- the loop ---
  let timer = null;
  let lastSeen = "";
  let isPolling = false;
  let isWanted = false;

  const poll = async () => {
    // A second request while one is under way would answer with older data: the loop runs once more instead.
    if (isPolling) {
      isWanted = true;
      return;
    }
    isPolling = true;
    window.clearTimeout(timer);
    const startMs = performance.now();
    let waitMs = POLL_MS;
    try {
      let { runs } = await Board.source.runs(state.chosen || []);
      if (state.chosen === null) {
        const newest = [...runs].sort((a, b) => (a.age_s ?? Infinity) - (b.age_s ?? Infinity));
        state.chosen = newest.slice(0, DEFAULT_CHOSEN).map((run) => run.key);
        ({ runs } = await Board.source.runs(state.chosen));
      }
      state.runs = runs;
      state.chosen = state.chosen.filter((key) => runs.some((run) => run.key === key));
      chooseSlots();
      drawRuns();
      const chosen = chosenRuns();
      const seen = JSON.stringify(chosen.map((run) => [run.key, run.version, run.slot]));
      if (seen !== lastSeen) {
        lastSeen = seen;
        await refresh();
      }
      const hasMore = chosen.some((run) => run.has_more);
      waitMs = hasMore ? 0 : Math.max(POLL_MS, BUSY_FACTOR * (performance.now() - startMs));
      const running = runs.filter((run) => run.state === "running").length;
      if (Board.source.isLive) say(`${running} of ${runs.length} running`);
      else say(`as of ${new Date(Board.source.exportedMs).toLocaleString()}`);
    } catch (error) {
      // The server ended, or the connection is lost: the page stays as it is and tries again.
      say(`not connected (${error.message}); trying again`, true);
    }
    isPolling = false;
    if (isWanted || (Board.source.isLive && !document.hidden)) {
      timer = window.setTimeout(poll, isWanted ? 0 : waitMs);
      isWanted = false;
    }
  };

  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && Board.source.isLive) poll();
  });
  let resizeTimer = null;
  window.addEventListener("resize", () => {
    window.clearTimeout(resizeTimer);
    resizeTimer = window.setTimeout(refresh, 150);
  });

  Board.setUpTheme(place.theme, refresh);
  readAddress();
  drawTabs();
  const tab = document.getElementById(`tab-${state.view}`);
  tab.setAttribute("aria-selected", "true");
  place.panel.setAttribute("aria-labelledby", tab.id);
  for (const other of place.tabs.children) other.tabIndex = other === tab ? 0 : -1;
  poll();
})();
