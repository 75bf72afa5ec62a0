"""The settings of the layer; `glm5_plugins.settings.model` reads the environment."""
