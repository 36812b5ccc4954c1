// The site's search runs in a worker, and a browser starts none for a page that is opened from a folder. There
// a hidden frame takes its place.
if (location.protocol === "file:")
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          const script = inside.document.createElement("script")
          script.src = url
          script.onload = () => resolve(inside)
          inside.document.body.append(script)
        }
      })
      document.documentElement.append(frame)
    }
    async postMessage(data) {
      const inside = await this.ready
      inside.dispatchEvent(new inside.MessageEvent("message", { data }))
    }
  }
