"""The pages as a site: `python -m docs.site` builds it in `build/site`."""
