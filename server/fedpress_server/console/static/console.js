// Keeps the page's live part current: asks for the same page every five seconds while it is visible.
const EVERY = 5000;
const part = document.querySelector("[data-live]");
let etag = "";

async function refresh() {
  if (document.hidden) return;
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
  if (fresh) replace(fresh);
}

// Leaves the focus, and how far tables are scrolled, as they are.
function replace(fresh) {
  const same = (one) => one.href ?? one.getAttribute("aria-label");
  const focus = part.contains(document.activeElement) ? same(document.activeElement) : null;
  const scrolled = new Map([...part.querySelectorAll(".scroll")].map((each) => [same(each), each.scrollLeft]));
  part.replaceChildren(...fresh.childNodes);
  for (const each of part.querySelectorAll(".scroll")) each.scrollLeft = scrolled.get(same(each)) ?? 0;
  if (focus) [...part.querySelectorAll("a, .scroll")].find((each) => same(each) === focus)?.focus({ preventScroll: true });
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
