// Esc ends the running answer; a page that comes back into view catches up with what went on meanwhile.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("#stop")?.click();
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") document.querySelector("#refresh")?.click();
});
