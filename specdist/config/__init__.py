"""The options of all jobs: flat dataclasses, from one YAML file and the command line."""
