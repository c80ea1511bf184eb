"""The main job: variants trained under equal conditions, judged over seeds, told in results.json."""
