// Browsers start no worker from a page that was opened from a folder: the search then runs in a hidden frame in its place.
// The theme's search looks for this name, and waits for what `importScripts` returns.
class IFrameWorker extends EventTarget {
  constructor(url) {
    super();
    this.onmessage = null;
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.appendChild(frame);
    this.inside = frame.contentWindow;
    const load = (source) =>
      new Promise((resolve, reject) => {
        const script = this.inside.document.createElement("script");
        script.src = new URL(source, document.baseURI).href;
        script.onload = resolve;
        script.onerror = reject;
        this.inside.document.body.appendChild(script);
      });
    this.inside.importScripts = (...sources) =>
      sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
    this.inside.postMessage = (data) => {
      const message = new MessageEvent("message", { data });
      if (this.onmessage) this.onmessage(message);
      this.dispatchEvent(message);
    };
    this.ready = load(url);
  }

  postMessage(data) {
    this.ready.then(() => {
      const message = new this.inside.MessageEvent("message", { data });
      if (this.inside.onmessage) this.inside.onmessage(message);
      this.inside.dispatchEvent(message);
    });
  }

  terminate() {
    this.inside.frameElement.remove();
  }
}

window.IFrameWorker = IFrameWorker;
if (location.protocol === "file:") window.Worker = IFrameWorker;
