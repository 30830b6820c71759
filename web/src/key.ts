// The API key, where the server wants one. It is kept for this tab and goes with it.

import { signal } from "@preact/signals";

const kept = "rocket.key";
const protocol = "rocket.v1";

function read(): string {
  try {
    return sessionStorage.getItem(kept) ?? "";
  } catch {
    return ""; // no storage: the key lasts as long as the page
  }
}

export const apiKey = signal(read());

/** The server refused a call for want of a good key. */
export const keyWanted = signal(false);

/** The person did not want to give one now; they are not asked again by every retry. */
export const keyDeclined = signal(false);

export function wantKey(): void {
  if (!keyDeclined.value) keyWanted.value = true;
}

export function declineKey(): void {
  keyDeclined.value = true;
  keyWanted.value = false;
}

/** Keeps a key, or forgets it with "". */
export function keepKey(key: string): void {
  apiKey.value = key;
  keyWanted.value = keyDeclined.value = false;
  try {
    if (key) sessionStorage.setItem(kept, key);
    else sessionStorage.removeItem(kept);
  } catch {
    // As above.
  }
}

export function authorization(): Record<string, string> {
  return apiKey.value ? { Authorization: `Bearer ${apiKey.value}` } : {};
}

/** A browser cannot set headers of a WebSocket, and an address would be kept in logs: the key travels as a protocol's name. */
export function protocols(): string[] {
  return apiKey.value ? [protocol, `rocket.key.${apiKey.value}`] : [protocol];
}
