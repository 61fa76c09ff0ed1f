"""MTP: DeepSeek-V3's sequential modules, as a drafter of any target."""

from outrider.drafters.mtp.method import MTP_METHOD, MTPSection
from outrider.drafters.mtp.module import MTP, MTPConfig
from outrider.drafters.mtp.serve import MTPDrafter

__all__ = ["MTP", "MTP_METHOD", "MTPConfig", "MTPDrafter", "MTPSection"]
