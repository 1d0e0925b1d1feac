"""Where candidates come from besides a draft model"""
