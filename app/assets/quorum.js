// Esc ends the running answer, Alt + N begins a new chat; a page that comes back into view catches up with what went on meanwhile.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("#stop")?.click();
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    document.querySelector("#new-chat")?.click();
  }
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") document.querySelector("#refresh")?.click();
});
