// Search on a file system, where browsers allow no Worker: a hidden frame runs its script instead. The plugin `offline`
// would load such a stand-in (of this name) from another host.
(() => {
  if (location.protocol !== "file:") return

  const load = (inside, url) =>
    new Promise((resolve, reject) => {
      const script = inside.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = () => reject(new Error(`cannot load ${url}`))
      inside.document.head.append(script)
    })

  class FrameWorker extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentWindow
      inside.document.open() // Firefox would replace a document that was not written
      inside.document.write("<!doctype html><html><head></head><body></body></html>")
      inside.document.close()
      inside.postMessage = (data) => setTimeout(() => this.#answer(data))
      inside.importScripts = (...urls) => Promise.all(urls.map((one) => load(inside, new URL(one, document.baseURI).href)))
      this.ready = load(inside, new URL(url, document.baseURI).href)
    }

    #answer(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      this.onmessage?.(event)
    }

    postMessage(data) {
      const inside = this.frame.contentWindow
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }

  window.Worker = window.IFrameWorker = FrameWorker // the search asks its parent for the second name
})()
