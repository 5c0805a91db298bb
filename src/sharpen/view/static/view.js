// what the pages do beside being read
