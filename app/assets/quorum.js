// Esc ends the running answer, Alt + N begins a new chat; a page that comes back into view catches up with what went on meanwhile.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") document.querySelector("#stop")?.click();
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    document.querySelector("#new-chat")?.click();
    document.querySelector("#message textarea")?.focus();
  }
});
// Whoever presses one of these with a key sees it vanish, and writes on; a click tells that it was a key by counting none.
document.addEventListener("click", (event) => {
  if (event.detail === 0 && event.isTrusted && event.target.closest?.("#send, #stop, #retry, #resume, #new-chat"))
    document.querySelector("#message textarea")?.focus();
});
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") document.querySelector("#refresh")?.click();
});
// Something that is dropped on the Models tab is a model: the browser tells a path seldom, else a file's name and size.
document.addEventListener("dragover", (event) => {
  if (event.target.closest?.("#models")) event.preventDefault();
});
document.addEventListener("drop", (event) => {
  if (!event.target.closest?.("#models")) return;
  const data = event.dataTransfer;
  if (!data.files.length && event.target.closest("input, textarea")) return;
  event.preventDefault();
  const text = data.getData("text/uri-list") || data.getData("text/plain");
  const { name, size } = data.files[0] ?? {};
  const isFolder = Boolean(data.items[0]?.webkitGetAsEntry?.()?.isDirectory);
  const box = document.querySelector("#dropped :is(input, textarea)");
  box.value = JSON.stringify({ text, name, size, isFolder });
  box.dispatchEvent(new Event("input", { bubbles: true }));
});
