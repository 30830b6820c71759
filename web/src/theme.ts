// Light, dark, or what the system says; kept in the browser.

import { signal } from "@preact/signals";

export type Choice = "system" | "light" | "dark";
const key = "rocket.theme";
const order: Choice[] = ["system", "light", "dark"];

/** Rises when colours changed, for what does not live in CSS. */
export const themeVersion = signal(0);
export const themeChoice = signal<Choice>("system");

function apply(): void {
  const root = document.documentElement;
  if (themeChoice.value === "system") delete root.dataset["theme"];
  else root.dataset["theme"] = themeChoice.value;
  themeVersion.value++;
}

export function startTheme(): void {
  const kept = localStorage.getItem(key);
  if (kept === "light" || kept === "dark") themeChoice.value = kept;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  apply();
}

export function nextTheme(): void {
  themeChoice.value = order[(order.indexOf(themeChoice.value) + 1) % order.length]!;
  localStorage.setItem(key, themeChoice.value);
  apply();
}
