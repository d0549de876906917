// What the page is sent is kept here until Gradio takes it over: the values of its components by their places, the chat's first.
const quorum = {
  news: [],
  waiting: [],
  leave() {},
  take() {
    const news = this.news;
    this.news = [];
    return news;
  },
  visible(...parts) {
    return parts.map((visible) => ({ __type__: "update", visible }));
  },
  // What was typed and not sent outlives a reload, Gradio's own after a lost connection among them.
  recall() {
    const unsent = sessionStorage.getItem("quorum-unsent") ?? "";
    sessionStorage.removeItem("quorum-unsent");
    return unsent;
  },
  tellAway(isAway) {
    document.querySelector("#away")?.remove();
    if (!isAway) return;
    const told = "Quorum does not answer. If it has ended, start it again: this page goes on where it was.";
    document.body.insertAdjacentHTML("beforeend", `<p id="away" class="q-alert" role="alert">${told}</p>`);
  },
  // Resolves when all is quiet, also for those whose stream another one took over from.
  watch(conversation, words, view, turns, listed) {
    this.leave();
    const asked = new URLSearchParams({ conversation, words, view, turns, listed });
    const stream = new EventSource(`/page/state?${asked}`);
    this.leave = () => stream.close();
    let messages = [];
    // The browser tries again by itself, and what comes then begins anew.
    stream.addEventListener("error", () => this.tellAway(true));
    stream.addEventListener("open", () => this.tellAway(false));
    stream.addEventListener("message", ({ data }) => {
      const { values, chat } = JSON.parse(data);
      for (const [place, value] of Object.entries(values)) this.news[Number(place) + 1] = value;
      if (chat) this.news[0] = messages = [...messages.slice(0, chat.kept), ...chat.more];
      document.querySelector("#take").click();
    });
    stream.addEventListener("end", () => {
      stream.close();
      for (const over of this.waiting.splice(0)) over();
    });
    return new Promise((over) => this.waiting.push(over));
  },
};
// Esc ends the running answer and takes back a wish to delete, Alt + N begins a new chat; a page that comes back into view catches up with what went on meanwhile.
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") for (const button of document.querySelectorAll("#stop, #keep-chat")) button.click();
  if (event.altKey && event.code === "KeyN") {
    event.preventDefault();
    document.querySelector("#new-chat")?.click();
    document.querySelector("#message textarea")?.focus();
  }
});
// An edited question is sent by the key that sends a new one.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || !event.target.matches?.("#chat textarea")) return;
  event.preventDefault();
  let around = event.target;
  while (around && !around.querySelector('[aria-label="Submit"]')) around = around.parentElement;
  around?.querySelector('[aria-label="Submit"]').click();
});
// Whoever presses one of these with a key sees it vanish, and writes on; a click tells that it was a key by counting none.
document.addEventListener("click", (event) => {
  if (event.detail === 0 && event.isTrusted && event.target.closest?.("#send, #stop, #retry, #resume, #new-chat"))
    document.querySelector("#message textarea")?.focus();
});
addEventListener("pagehide", () => {
  const unsent = document.querySelector("#message textarea")?.value;
  if (unsent) sessionStorage.setItem("quorum-unsent", unsent);
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
