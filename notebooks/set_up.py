import importlib.metadata
import os
import pathlib
import shutil
import subprocess
import sys

# On Colab: the address of a git repository of calm_jax. Leave it empty if this notebook is in a clone.
REPOSITORY = ""

here = pathlib.Path.cwd()
clones = (
    path
    for path in (here, here.parent, here / "calm_jax")
    if (path / "configs/quickstart.py").exists()
)
root = next(clones, None)
if root is None:
    if not REPOSITORY:
        raise SystemExit(
            "This folder is not a clone of calm_jax: set REPOSITORY above to an address to clone it from."
        )
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, "calm_jax"], check=True)
    root = here / "calm_jax"
os.chdir(root)
sys.path.insert(0, str(root))
try:
    importlib.metadata.version("calm_jax")
    import matplotlib  # noqa: F401
    import safetensors  # noqa: F401
except ImportError:
    accelerator = ",tpu" if "TPU_NAME" in os.environ else ""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, check=True, capture_output=True, text=True).stdout
        # CUDA 13 needs driver 580.
        accelerator = ",cuda" if int(driver.split(".")[0]) >= 580 else ",cuda12"
    extras = f".[interop,plot{accelerator}]"
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "-e", extras], check=True)

# In a process of its own: a TPU belongs to one process, and the commands that train need it before the notebook does.
show_devices = """
import jax
print(f"jax {jax.__version__} on {jax.devices()[0].device_kind} ({jax.default_backend()}), {jax.device_count()} device(s)")
"""
done = subprocess.run(
    [sys.executable, "-c", show_devices], check=True, stdout=subprocess.PIPE, text=True
)
print(done.stdout, end="")
