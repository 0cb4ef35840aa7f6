// Runs the search in a hidden frame if the site is read from the file system, where browsers do not
// start workers. Supports what the theme's search needs: messages, and importScripts.
if (location.protocol === "file:") {
  const frameCode = `
    addEventListener = self.addEventListener.bind(self)
    self.postMessage = data => parent.dispatchEvent(new MessageEvent("lbbsp-search", { data }))
    self.importScripts = (...urls) => urls.reduce((before, url) => before.then(() =>
      new Promise((resolve, reject) => {
        const script = document.createElement("script")
        script.src = url
        script.onload = resolve
        script.onerror = reject
        document.body.appendChild(script)
      })), Promise.resolve())
  `
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      addEventListener("lbbsp-search", event => {
        const message = new MessageEvent("message", { data: event.data })
        this.dispatchEvent(message)
        if (this.onmessage) this.onmessage(message)
      })
      const page = this.frame.contentWindow.document
      page.open()
      page.write(`<body><script>${frameCode}<\/script><script src="${url}"><\/script></body>`)
      page.close()
      this.ready = new Promise(resolve => { this.frame.onload = resolve })
    }

    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(
        new MessageEvent("message", { data })
      ))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
