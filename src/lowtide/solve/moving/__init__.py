"""Schedules that move storages to a second memory and back."""
