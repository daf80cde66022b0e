// The page: the list of runs, the tabs, and the loop that follows the runs.
"use strict";

(() => {
  const { address, element } = Board;
  const VIEWS = ["curves", "experts", "memory", "ranks", "faults", "rollouts", "recipes"];
  const DEFAULT_CHOSEN = 4;
  const POLL_MS = 2000;
  const READING_MS = 3000;
  const BUSY_FACTOR = 5;
  const NONE = "none";

  const place = Object.fromEntries(["status", "theme", "runs", "tabs", "panel"].map((id) => [id, document.getElementById(id)]));
  // Until somebody chooses, the newest runs are drawn, and those that start join them.
  const state = {
    runs: [], max: 1, chosen: address.list("runs").filter((key) => key !== NONE), isDefault: address.get("runs") === null,
    view: VIEWS.find((view) => view === address.get("view")) || VIEWS[0], turn: 0, cache: new Map(),
  };

  // By their names, so that curves and legends do not depend on the order of the clicks.
  const chosenRuns = () => Board.byName(state.runs.filter((run) => state.chosen.includes(run.key))).slice(0, state.max);

  const setAll = (keys) => {
    state.isDefault = false;
    state.chosen = keys;
    address.set({ runs: keys.join(",") || NONE });
    drawRuns();
    poll();
  };

  const drawRuns = () => Board.drawRuns(place.runs, state.runs, {
    keys: chosenRuns().map((run) => run.key),
    max: state.max,
    set: (key, isChosen) => setAll(isChosen ? [...state.chosen, key] : state.chosen.filter((one) => one !== key)),
    setAll,
  });

  // The page of a board without runs: it waits for the first.
  const setEmpty = (isEmpty, folders) => {
    if (place.tabs.hidden === isEmpty) return;
    place.runs.hidden = place.tabs.hidden = isEmpty;
    if (isEmpty) {
      place.panel.replaceChildren(element("div", { class: "empty" },
        element("h2", {}, "No runs yet"),
        element("p", {}, "This page waits. A run appears as soon as a job has written to a folder in:"),
        element("ul", {}, folders.map((folder) => element("li", {}, element("code", {}, folder)))),
        element("p", {}, "Start one in another terminal, for example:"),
        element("pre", {}, `moefold train RECIPE run.dir=${folders[0] || "runs"}/first`)));
      place.panel.dataset.ready = "empty";
    } else place.panel.replaceChildren();
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
    address.set({ view });
    place.panel.replaceChildren();
    // Before the first answer there is nothing to draw.
    if (state.runs.length) refresh();
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
  let drawnMs = -Infinity;
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
      let answer = await Board.source.runs(state.chosen);
      if (state.isDefault) {
        const others = Board.newestFirst(answer.runs).filter((run) => !state.chosen.includes(run.key));
        const joining = others.slice(0, DEFAULT_CHOSEN - state.chosen.length).map((run) => run.key);
        state.chosen = [...state.chosen, ...joining];
        if (joining.length) answer = await Board.source.runs(state.chosen);
      }
      const { runs } = answer;
      state.runs = runs;
      state.max = answer.max_chosen;
      Board.smoothingWeights = answer.smoothing;
      setEmpty(!runs.length, answer.folders);
      if (runs.length) drawRuns();
      const chosen = chosenRuns();
      const seen = JSON.stringify([runs.length > 0, chosen.map((run) => [run.key, run.version, run.name])]);
      const hasMore = chosen.some((run) => run.has_more);
      // Long runs come in parts, and each takes as long to draw as all of them.
      if (seen !== lastSeen && !(hasMore && performance.now() - drawnMs < READING_MS)) {
        lastSeen = seen;
        if (runs.length) await refresh();
        drawnMs = performance.now();
      }
      waitMs = hasMore ? 0 : Math.max(POLL_MS, BUSY_FACTOR * (performance.now() - startMs));
      const running = runs.filter((run) => run.state === "running").length;
      if (Board.source.isLive) say(runs.length ? `${running} of ${runs.length} running` : "waiting for a run");
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
    resizeTimer = window.setTimeout(() => state.runs.length && refresh(), 150);
  });

  // The fragment of the address is taken: see address.js.
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();
    place.panel.focus();
  });
  Board.setUpTheme(place.theme, () => state.runs.length && refresh());
  drawTabs();
  const tab = document.getElementById(`tab-${state.view}`);
  tab.setAttribute("aria-selected", "true");
  place.panel.setAttribute("aria-labelledby", tab.id);
  for (const other of place.tabs.children) other.tabIndex = other === tab ? 0 : -1;
  poll();
})();
