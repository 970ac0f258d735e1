// A page opened from disk may start no worker: its search then runs in a hidden frame. Given the name by which the
// plugin `offline` knows such a script, which it would fetch from the network otherwise.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      const inside = this.frame.contentDocument
      inside.open()
      inside.write("<!doctype html><body>")
      inside.close()
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.createElement("script")
      this.ready = new Promise((done, failed) => Object.assign(script, { src: url, onload: done, onerror: failed }))
      inside.body.append(script)
    }

    async postMessage(data) {
      await this.ready
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
