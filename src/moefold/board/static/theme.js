// Light and dark: the system's choice, unless the button has chosen.
"use strict";
window.Board = window.Board || {};

(() => {
  const KEY = "moefold-board-theme";
  const system = window.matchMedia("(prefers-color-scheme: dark)");

  const stored = () => {
    try {
      return window.localStorage.getItem(KEY);
    } catch {
      return null; // Storage is off: the choice lasts as long as the page.
    }
  };

  const apply = (theme) => {
    if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
  };

  const isDark = () => (document.documentElement.dataset.theme || (system.matches ? "dark" : "light")) === "dark";

  apply(stored());

  Board.isDark = isDark;

  Board.setUpTheme = (button, onChange) => {
    const show = () => {
      button.textContent = isDark() ? "Light" : "Dark";
      button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
    };
    button.addEventListener("click", () => {
      const theme = isDark() ? "light" : "dark";
      apply(theme);
      try {
        window.localStorage.setItem(KEY, theme);
      } catch {
        // Storage is off: see above.
      }
      show();
      onChange();
    });
    system.addEventListener("change", () => {
      show();
      onChange();
    });
    show();
  };
})();
