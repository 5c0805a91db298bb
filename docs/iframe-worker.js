/* Search without a server. A browser starts no worker for a page that was opened from the disk, so there the worker's
   script runs in a hidden frame, and what both send each other are events. The theme asks for nothing more of a worker. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.srcdoc = "<!doctype html><title>search</title>"
      this.inside = new Promise((ready) => {
        this.frame.addEventListener("load", () => {
          const inside = this.frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = new URL(url, location)
          script.addEventListener("load", () => ready(inside))
          inside.document.head.append(script)
        }, { once: true })
      })
      document.body.append(this.frame)
    }

    postMessage(data) {
      this.inside.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
