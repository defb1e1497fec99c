/* Search, where the site is read from disk: browsers start no worker from a file, so the search runs in a hidden frame. */
class FrameWorker extends EventTarget {
  constructor(url) {
    super()
    this.frame = document.createElement("iframe")
    this.frame.hidden = true
    document.body.appendChild(this.frame)
    this.inner = this.frame.contentWindow
    this.inner.document.open()
    this.inner.document.write("<body></body>")
    this.inner.document.close()
    this.inner.postMessage = data => {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }
    this.inner.importScripts = (...urls) => Promise.all(urls.map(each => this.load(each)))
    this.ready = this.load(url)
  }

  load(url) {
    return new Promise((resolve, reject) => {
      const script = this.inner.document.createElement("script")
      script.src = url
      script.onload = resolve
      script.onerror = reject
      this.inner.document.body.appendChild(script)
    })
  }

  postMessage(data) {
    this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })))
  }

  terminate() {
    this.frame.remove()
  }
}

if (location.protocol === "file:") window.Worker = FrameWorker
