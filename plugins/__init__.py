"""The bundled plugins, one file each; `glm5_plugins.manager.BUNDLED` lists them."""
