"""The console: pages for operators with a browser, over the same services as the API."""
