pytest_plugins = ["support.plugin"]  # shared with integrations/conftest.py
