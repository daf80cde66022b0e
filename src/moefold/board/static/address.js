// The address of the page: what it shows, so that a link or a reload shows the same.
"use strict";

(() => {
  const parts = new Map(new URLSearchParams(window.location.hash.slice(1)));

  Board.address = {
    get: (name) => parts.get(name) ?? null,
    list: (name) => (parts.get(name) || "").split(",").filter(Boolean),

    // A value that is empty or null leaves the address.
    set(values) {
      for (const [name, value] of Object.entries(values)) {
        if (value === null || value === "") parts.delete(name);
        else parts.set(name, String(value));
      }
      const text = [...parts].map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2C", ",")}`).join("&");
      window.history.replaceState(null, "", `#${text}`);
    },
  };

  // Another address in the same tab, pasted or of a bookmark.
  window.addEventListener("hashchange", () => window.location.reload());
})();
