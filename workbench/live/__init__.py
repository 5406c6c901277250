"""Live: widgets that hold an engine. They run requests and show them while they run; `display` draws what is left."""
