// Keeps the page's live part current: asks for the same page every five seconds while it is visible.
const EVERY = 5000;
const part = document.querySelector("[data-live]");
let etag = "";

async function refresh() {
  if (document.hidden || part.contains(document.activeElement)) return;
  const answer = await fetch(location.href, {
    cache: "no-store",
    redirect: "manual",
    headers: etag ? { "If-None-Match": etag } : {},
  });
  if (answer.type === "opaqueredirect") location.reload(); // the session has ended
  if (answer.status === 304) return;
  if (!answer.ok) throw new Error(String(answer.status));
  etag = answer.headers.get("ETag") ?? "";
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  const fresh = page.querySelector("[data-live]");
  if (fresh) part.replaceChildren(...fresh.childNodes);
}

async function keep() {
  const note = document.querySelector("[data-stale]");
  try {
    await refresh();
    note.hidden = true;
  } catch {
    note.hidden = false;
  }
  setTimeout(keep, EVERY);
}

if (part) setTimeout(keep, EVERY);
