// Where the data comes from: the server, or the script of a static export.
"use strict";

(() => {
  class ServerSource {
    isLive = true;

    async runs(wanted) {
      return this._get(`api/runs?want=${wanted.map(encodeURIComponent).join(",")}`);
    }

    async answer(key, name, query = {}) {
      const text = new URLSearchParams(query).toString();
      return this._get(`api/runs/${encodeURIComponent(key)}/${name}${text ? `?${text}` : ""}`);
    }

    async _get(address) {
      const response = await fetch(address, { credentials: "same-origin" });
      if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
      return response.json();
    }
  }

  class ExportedSource {
    isLive = false;

    constructor(data) {
      this._data = data;
      this.exportedMs = data.exported_s * 1000;
    }

    async runs() {
      const { runs, max_chosen, smoothing } = this._data;
      return { runs, max_chosen, smoothing, folders: [] };
    }

    async answer(key, name, query = {}) {
      const answer = this._data.data[key][name];
      return name === "rollouts" ? this._rollouts(answer, query) : answer;
    }

    _rollouts(answer, query) {
      const text = (query.text || "").toLowerCase();
      const bound = (name) => (query[name] === undefined ? null : Number(query[name]));
      const [low, high, step, before] = ["min_reward", "max_reward", "step", "before"].map(bound);
      const limit = Number(query.limit || 20);
      const matches = (rollout) =>
        (before === null || rollout.number < before) &&
        (step === null || rollout.step === step) &&
        (low === null || (rollout.reward !== null && rollout.reward >= low)) &&
        (high === null || (rollout.reward !== null && rollout.reward <= high)) &&
        [...rollout.prompt, ...rollout.completion].map((part) => part.text).join("\n").toLowerCase().includes(text);
      const found = answer.rollouts.filter(matches);
      const rollouts = found.slice(0, limit);
      return {
        rollouts,
        before: found.length > limit ? rollouts[limit - 1].number : null,
        total: answer.total,
        exported: answer.rollouts.length,
      };
    }
  }

  Board.source = window.MOEFOLD_BOARD ? new ExportedSource(window.MOEFOLD_BOARD) : new ServerSource();
})();
