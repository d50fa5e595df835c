"""The local web server: the page, the engine, the shaders and the packs. Nothing leaves the machine."""
