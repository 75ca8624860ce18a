"""The filter for NVFlare jobs; its path in a job's config is `hyperleak.nvflare.LeakageFilter`."""

try:
    from eval.federations.nvflare import LeakageFilter
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "nvflare":
        raise
    raise ModuleNotFoundError(
        "hyperleak.nvflare needs NVFlare: pip install '.[nvflare]' in the folder of hyperleak", name="nvflare"
    ) from error

__all__ = ["LeakageFilter"]
