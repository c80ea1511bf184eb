"""The main job: variants trained under equal conditions and judged over seeds, in results.json."""
